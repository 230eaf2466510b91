"""What travels arrives as it was, and what makes no sense is dropped and counted."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nodes import answers, request, running, staircase_routes, tokens_of, world
from serving import Tiny
from tiny import CONTEXT, HIDDEN, TOP_K, VOCABULARY
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.wave import NOT_PROBED, Wave
from trimmoe.runtime.node.records.messages import (
    MESSAGE_TYPES,
    Ask,
    Dispatch,
    Followed,
    Granted,
    LoadReport,
    Message,
    Onward,
    Parcel,
    Partial,
    Prefix,
    Prompt,
    Propagate,
    Release,
    Reserve,
    Retain,
    Running,
    SamplingSpec,
    SeenSpec,
    Start,
    Tokens,
    Vitals,
    Withdraw,
    access_of,
    first_sequence,
)
from trimmoe.runtime.node.records.packing import (
    MalformedMessage,
    pack_ledger,
    pack_wave,
    sealed,
    unpack_charge,
    unpack_ledger,
    unpack_wave,
)
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.sequences import Written
from trimmoe.runtime.node.records.tokens import (
    After,
    ChargeSpec,
    LedgerSpec,
    ReceiptSpec,
    ScoreSpec,
    Token,
)
from trimmoe.runtime.wire.codec import decode, encode
from wires import until

MOST = np.iinfo(np.uint16).max


@st.composite
def waves(draw: st.DrawFn) -> Wave:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, layers, servers = draw(st.tuples(*[st.integers(1, 6)] * 3))
    access = rng.integers(servers, size=count)
    real = {
        name: rng.random(size=count)
        for name in (
            "draws", "loss_weight", "exit_loss", "confidence_needed", "budget", "allowance",
            "delay_s", "loss",
        )
    }  # fmt: skip
    return Wave.of(
        layer=int(rng.integers(layers)),
        sequences=tuple(first_sequence(one, int(rng.integers(2**32))) for one in access.tolist()),
        layer_count=layers,
        server_count=servers,
        access=access,
        route=np.zeros(count, dtype=np.int64),
        server=rng.integers(servers, size=count),
        confidence=np.where(rng.random(count) < 0.5, -np.inf, rng.random(count)),
        ahead=np.where(rng.random(count) < 0.5, np.inf, rng.random(count)),
        exit_at=rng.integers(1, layers + 1, size=count),
        probed=rng.choice([NOT_PROBED, 0, layers - 1], size=count),
        answered_s=np.where(rng.random(count) < 0.5, rng.random(count), np.inf),
        kinds=rng.integers(len(Kind), size=(count, layers)),
        slots_run=rng.integers(1000, size=count),
        slots_dropped=rng.integers(1000, size=count),
        messages=rng.integers(MOST + 1, size=(count, servers, servers)),
        **real,
    )


def test_a_prompts_charge_beyond_what_its_tokens_were_credited_is_refused() -> None:
    shape = {"layer_count": 2, "server_count": 3, "hidden_bytes": 64}
    ledger = unpack_charge(ChargeSpec(4, 0.07), 0.02, **shape)
    assert (ledger.tokens, ledger.loss, ledger.budget) == (0, 0.07, 0.08)
    # Four times a float's worth, summed, may come out a bit above four times it.
    assert unpack_charge(ChargeSpec(3, 0.1 + 0.1 + 0.1), 0.1, **shape).loss <= 3 * 0.1
    for loss in (0.081, -0.01, math.nan, math.inf):
        with pytest.raises(MalformedMessage):
            unpack_charge(ChargeSpec(4, loss), 0.02, **shape)


@given(waves())
def test_a_wave_arrives_as_it_left(wave: Wave) -> None:
    layers, servers = wave.kinds.shape[1], wave.messages.shape[1]
    packed = pack_wave(wave)
    again = unpack_wave(
        packed,
        layer=wave.layer,
        sequences=wave.sequences,
        layer_count=layers,
        server_count=servers,
    )
    for item in fields(Wave):
        np.testing.assert_array_equal(getattr(again, item.name), getattr(wave, item.name))
    assert (again.words.dtype, again.words.shape) == (wave.words.dtype, wave.words.shape)
    with pytest.raises(MalformedMessage):
        unpack_wave(
            packed[:-1],
            layer=0,
            sequences=wave.sequences,
            layer_count=layers,
            server_count=servers,
        )


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 6))
def test_a_ledger_arrives_as_it_left(seed: int, layers: int, servers: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = np.zeros((layers, len(Kind)), dtype=np.int64)
    kinds[np.arange(layers), rng.integers(len(Kind), size=layers)] = 1
    ledger = Ledger(
        tokens=1,
        kinds=kinds,
        slots_run=int(rng.integers(99)),
        slots_dropped=int(rng.integers(99)),
        messages=rng.integers(99, size=(servers, servers)),
        hidden_bytes=64,
        delay_s=float(rng.random()),
        loss=float(rng.random()),
        budget=float(rng.random()),
        audits=int(rng.integers(2)),
    )
    again = unpack_ledger(
        pack_ledger(ledger), layer_count=layers, server_count=servers, hidden_bytes=64
    )
    for item in fields(Ledger):
        np.testing.assert_array_equal(getattr(again, item.name), getattr(ledger, item.name))


@pytest.mark.parametrize("part", ["kinds", "messages"])
@pytest.mark.parametrize("left", [1, -1], ids=["one", "all but one"])
def test_a_ledger_cut_short_is_refused(part: str, left: int) -> None:
    empty = Ledger.empty(3, 2, 64)
    whole = pack_ledger(dataclasses.replace(empty, tokens=1, kinds=np.eye(3, len(Kind), dtype=int)))
    cut = replace(whole, **{part: getattr(whole, part)[:left]})
    with pytest.raises(MalformedMessage, match=part):
        unpack_ledger(cut, layer_count=3, server_count=2, hidden_bytes=64)


@given(waves())
def test_rows_pass_the_codec_with_their_wave(wave: Wave) -> None:
    count = len(wave.sequences)
    rows = Rows(list(wave.sequences), list(range(count)), [1] * count, [])
    start = Start(rows=rows, tokens=list(range(count)))
    message = sealed(Parcel(to=0, message=start, wave=wave))
    (arrived, tensors) = decode(encode(message), MESSAGE_TYPES)
    assert arrived == message
    assert tensors == ()
    assert isinstance(arrived, Start)
    assert arrived.wave == pack_wave(wave)


def test_every_message_has_a_tag_of_its_own() -> None:
    tags = [kind.__struct_config__.tag for kind in MESSAGE_TYPES]
    assert len(set(tags)) == len(tags) == len(Message.__subclasses__())


@given(st.integers(0, 1000), st.integers(0, 2**62), st.integers(0, 2**20))
def test_a_sequences_number_says_whose_it_is(access: int, incarnation: int, later: int) -> None:
    assert access_of(first_sequence(access, incarnation) + later % 2**16) == access


@given(st.permutations(range(8)))
def test_states_may_be_written_in_any_order(order: list[int]) -> None:
    written = Written()
    for done, position in enumerate(order):
        written.mark(position, 1)
        present = set(order[: done + 1])
        assert written.length == next(i for i in range(9) if i not in present)


THEIRS = first_sequence(1, 0) + 7
"""A sequence of the users of the server that sends it."""


def one(counts: int = 1, starts: int = 0, epoch: int = 0, token: int = -1) -> Rows:
    return Rows([THEIRS], [starts], [counts], [], [epoch], [token])


HIDDEN_ROW = torch.zeros(1, HIDDEN)
EXPERTS, GATES = torch.zeros(1, TOP_K, dtype=torch.int32), torch.zeros(1, TOP_K)
EXACT = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, None)
LEDGER = LedgerSpec(b"", 0, 0, bytes(8), 0.0, 0.0, 0.0, 0)
TOKEN = Token(7, 3, 1, None, [], None, None, None)
WRONG: list[dict[str, Any]] = [
    {"token": -1},
    {"token": VOCABULARY},
    {"position": CONTEXT + 1},
    {"epoch": -1},
    {"logprob": math.nan},
    {"top": [(VOCABULARY, -1.0)]},
    {"top": [(1, math.nan)]},
    {"ledger": replace(LEDGER, loss=math.inf)},
    {"ledger": replace(LEDGER, slots_run=2**62)},
    {"receipt": ReceiptSpec(math.nan, 0.0, 0.0, None)},
    {"receipt": ReceiptSpec(1e-320, 1.0, 0.0, None)},
    {"receipt": ReceiptSpec(0.0, 0.0, 0.0, math.nan)},
    {"charge": ChargeSpec(-1, 0.0)},
    {"scores": [ScoreSpec(VOCABULARY, -1.0, 1, [])]},
]
"""What no token is."""
IMPOSSIBLE = (
    one(epoch=2**62),
    one(token=VOCABULARY),
    one(starts=CONTEXT),
    Rows([first_sequence(99, 0)], [0], [1], []),
    Rows([-1], [0], [1], []),
)
NONSENSE: list[tuple[Message, tuple[torch.Tensor, ...]]] = [
    (Prompt(sequence=THEIRS), ()),
    (Prompt(sequence=THEIRS), (torch.zeros(3),)),
    (Prompt(sequence=THEIRS), (torch.zeros(0, dtype=torch.int32),)),
    (Start(rows=one(), tokens=[1, 2]), ()),
    (Start(rows=one(), tokens=[1], wave=b"short"), ()),
    (Propagate(layer=0, rows=one(), frozen=True), ()),
    (Propagate(layer=99, rows=one(), frozen=True), (HIDDEN_ROW,)),
    (Propagate(layer=-1, rows=one(), frozen=True), (HIDDEN_ROW,)),
    (Propagate(layer=0, rows=one(starts=-1), frozen=True), (HIDDEN_ROW,)),
    (Propagate(layer=0, rows=one(counts=2), frozen=True), (HIDDEN_ROW,)),
    (Propagate(layer=0, rows=Rows([], [], [], []), frozen=True), (HIDDEN_ROW,)),
    (Propagate(layer=0, rows=one(), frozen=True), (HIDDEN_ROW.to(torch.int32),)),
    (Partial(layer=0, rows=one(), decoding=True), (HIDDEN_ROW[:, :5],)),
    *(
        (Partial(layer=0, rows=one(), decoding=True, wide=wide), tensors)
        for wide, tensors in (
            ([0], (HIDDEN_ROW,)),
            ([0], (HIDDEN_ROW, HIDDEN_ROW.double())),
            ([1], (HIDDEN_ROW[:0], HIDDEN_ROW.double())),
            ([0], (HIDDEN_ROW[:0], HIDDEN_ROW.int())),
            ([], (HIDDEN_ROW.double(),)),
        )
    ),
    (
        Onward(
            layer=0,
            rows=one(),
            awaited=[[1]],
            raw=[0],
            probes=[-1],
            decoding=False,
            last=False,
            wide=[0],
        ),
        (HIDDEN_ROW[:0], HIDDEN_ROW.double(), EXPERTS, GATES),
    ),
    (Dispatch(layer=0, rows=one(), destinations=[0], decoding=True), (HIDDEN_ROW,)),
    (
        Dispatch(layer=0, rows=one(), destinations=[0, 1], decoding=True),
        (HIDDEN_ROW, EXPERTS, GATES),
    ),
    (
        Dispatch(layer=0, rows=one(), destinations=[99], decoding=True),
        (HIDDEN_ROW, EXPERTS, GATES),
    ),
    (
        Dispatch(layer=0, rows=one(), destinations=[0], decoding=True),
        (HIDDEN_ROW, EXPERTS + 99, GATES),
    ),
    (
        Onward(layer=0, rows=one(), awaited=[], raw=[], probes=[-1], decoding=False, last=False),
        (HIDDEN_ROW,),
    ),
    (
        Onward(layer=0, rows=one(), awaited=[[]], raw=[5], probes=[-1], decoding=False, last=False),
        (HIDDEN_ROW, EXPERTS, GATES),
    ),
    (
        Onward(layer=0, rows=one(), awaited=[[]], raw=[], probes=[-1], decoding=True, last=False),
        (HIDDEN_ROW,),
    ),
    *(
        (
            Onward(
                layer=0,
                rows=one(),
                awaited=[[]],
                raw=[],
                probes=[-1],
                decoding=False,
                last=False,
                spent=spent,
            ),
            (HIDDEN_ROW,),
        )
        for spent in ([0.1, 0.1], [-0.1], [math.nan], [math.inf])
    ),
    (Reserve(THEIRS, [0], SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, None), 0.0, True), ()),
    (Reserve(THEIRS, [0, 1, 2, 99], SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, None), 0.0, True), ()),
    (Reserve(THEIRS, [0, 1, 0, 1], SamplingSpec(-1.0, 1.0, 0, 0.0, 0, 0, None), 0.0, True), ()),
    *(
        (
            Reserve(
                THEIRS,
                [0] * 4,
                SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, None),
                0.0,
                True,
                prefix=prefix,
            ),
            (),
        )
        for prefix in (Prefix(THEIRS, 0, True), Prefix(first_sequence(0, 0), 5, True))
    ),
    *(
        (Prompt(THEIRS, *numbers), (torch.ones(1, dtype=torch.int32),))
        for numbers in ((-1,), (0, -1))
    ),
    *(
        (Prompt(THEIRS, start), (torch.tensor(ids, dtype=torch.int32),))
        for start, ids in ((0, [-1]), (0, [VOCABULARY]), (CONTEXT, [1]), (0, [1] * (CONTEXT + 1)))
    ),
    # Of another server's users, who alone may say such things.
    *((kind([7]), ()) for kind in (Release, Retain)),
    (Withdraw(7, 0, 1), ()),
    (Ask(7), ()),
    (Prompt(7), (torch.ones(1, dtype=torch.int32),)),
    (Start(rows=Rows([7], [0], [1], []), tokens=[1]), ()),
    (Reserve(7, [0] * 4, EXACT, 0.0, True), ()),
    # A hundred bytes that would have a list of so many numbers made.
    (Withdraw(THEIRS, 0, 2**62), ()),
    (Withdraw(THEIRS, CONTEXT + 1, 1), ()),
    *((Propagate(layer=0, rows=rows, frozen=True), (HIDDEN_ROW,)) for rows in IMPOSSIBLE),
    (Start(rows=one(), tokens=[VOCABULARY]), ()),
    (Start(rows=one(starts=CONTEXT), tokens=[1]), ()),
    (Partial(layer=0, rows=one(), decoding=True, raw=True), (HIDDEN_ROW,)),
    *(
        (Reserve(THEIRS, [0] * 4, sampling, budget, True, seen=seen), ())
        for sampling, budget, seen in (
            (EXACT, math.nan, None),
            (EXACT, -0.1, None),
            (replace(EXACT, stop_ids=(VOCABULARY,)), 0.0, None),
            (replace(EXACT, logit_bias=((VOCABULARY, 1.0),)), 0.0, None),
            (replace(EXACT, min_tokens=1), 0.0, SeenSpec(1, [VOCABULARY])),
            (replace(EXACT, min_tokens=1), 0.0, SeenSpec(1, [1] * (CONTEXT + 1))),
        )
    ),
    (Granted(7, True, CONTEXT + 1), ()),
    *((Tokens([replace(TOKEN, **wrong)]), ()) for wrong in WRONG),
    *((Followed([After(7, LEDGER, True, replace(TOKEN, **wrong))]), ()) for wrong in WRONG),
    (Followed([After(7, replace(LEDGER, delay_s=math.nan), True)]), ()),
    (Running(-1), ()),
    (Running(1 << 31), ()),
    (LoadReport([None] * 2, [None] * 2, 0.0, math.nan, []), ()),
    (LoadReport([None] * 2, [None] * 2, 0.0, 0.0, [], loss_weights=[0.5] * 257), ()),
    (LoadReport([], [], 0.0, 0.0, []), ()),
    (LoadReport([None] * 2, [None] * 2, 0.0, 0.0, [99]), ()),
    (LoadReport([None] * 2, [None] * 2, 0.0, 0.0, [], vitals=Vitals(0, 0, 0, 0.0, [1])), ()),
    *(
        (LoadReport([None] * 2, [None] * 2, 0.0, 0.0, [], loss_weights=[weight]), ())
        for weight in (-0.1, 1.1, math.nan)
    ),
    *(
        (LoadReport([None] * 2, [None] * 2, 0.0, 0.0, [], prompts=share), ())
        for share in (-0.1, 1.1, math.nan)
    ),
    *(
        (LoadReport([None] * 2, [None] * 2, 0.0, 0.0, [], tokens_per_s=rate), ())
        for rate in (-1.0, math.inf, math.nan)
    ),
]


async def test_nonsense_from_a_peer_is_dropped_and_counted(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        bad, node = cluster.transports[1], cluster.nodes[0]
        for message, tensors in NONSENSE:
            await bad.send(cluster.names[0], message, tensors)
        await until(lambda: sum(node.malformed.values()) == len(NONSENSE))
        (made,) = await answers(cluster, [(0, request([3, 4, 5], 8))])
        await cluster.all_free()
    assert tokens_of(made) == tiny.greedy([3, 4, 5], 8, eos=None)


async def test_rows_of_sequences_that_are_over_are_forgotten(tiny: Tiny) -> None:
    """Late messages about them are harmless."""
    profile, plan = world(tiny, servers=2, routes=staircase_routes(2))
    layers = tiny.view.spec.layer_count
    onward = Onward(
        layer=1, rows=one(), awaited=[[0]], raw=[], probes=[-1], decoding=False, last=True
    )
    stray: list[tuple[Message, tuple[torch.Tensor, ...]]] = [
        (Prompt(sequence=THEIRS), (torch.zeros(3, dtype=torch.int32),)),
        (Propagate(layer=layers - 1, rows=one(), frozen=True), (HIDDEN_ROW,)),
        (Partial(layer=1, rows=one(), decoding=True), (HIDDEN_ROW,)),
        (onward, (HIDDEN_ROW,)),
    ]
    async with running(tiny, profile=profile, plan=plan) as cluster:
        for message, tensors in stray:
            await cluster.transports[1].send(cluster.names[0], message, tensors)
        (made,) = await answers(cluster, [(1, request([3, 4, 5], 8))])
        await cluster.all_free()
        assert not cluster.nodes[0].malformed
        assert cluster.nodes[0].snapshot().traffic.received[cluster.names[1]].messages >= 4
    assert tokens_of(made) == tiny.greedy([3, 4, 5], 8, eos=None)
    assert msgspec.structs.asdict(onward)["last"]
