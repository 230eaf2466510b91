"""A TCP proxy that delays every byte by the same time in each direction.

    python benchmarks/delay_proxy.py LISTEN_PORT TARGET_PORT ONE_WAY_MS

For systems that cannot emulate links themselves, such as llama.cpp's RPC servers.
"""

from __future__ import annotations

import asyncio
import socket
import sys

Queue = asyncio.Queue[tuple[float, bytes]]


async def _deliver(queue: Queue, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s, data = await queue.get()
        if not data:
            writer.close()
            return
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        writer.write(data)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop, queue = asyncio.get_running_loop(), Queue()
    delivering = asyncio.create_task(_deliver(queue, writer))
    data = b"-"
    while data:
        data = await reader.read(1 << 20)
        queue.put_nowait((loop.time() + delay_s, data))
    await delivering


async def _main(listen: int, target: int, delay_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        for one in (writer, far_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(_pump(reader, far_writer, delay_s), _pump(far_reader, writer, delay_s))

    server = await asyncio.start_server(connected, "127.0.0.1", listen)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1e3))
