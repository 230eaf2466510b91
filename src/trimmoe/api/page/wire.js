// What goes over the wire: keys, server-sent events, the live picture and answers.

const { html, render, useEffect, useMemo, useRef, useState } = toolkit;

const KEY = "trimmoe.key";

const keptKey = () => sessionStorage.getItem(KEY) ?? "";

const keepKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A response that is good; throws `Refused` with what the server says otherwise. */
async function asked(path, options = {}) {
  const key = keptKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const got = await fetch(path, { ...options, headers, cache: "no-store" });
  if (got.ok) return got;
  let message = `The server answers with status ${got.status}.`;
  try {
    message = (await got.json()).error.message;
  } catch {
    // It is no server of ours that says so.
  }
  throw new Refused(got.status, message);
}

/** Server-sent events of a response as they come. */
async function* eventsOf(got) {
  const reader = got.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const event = { name: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event:")) event.name = line.slice(6).trim();
          else if (line.startsWith("data:")) event.data += line.slice(5).trim();
        }
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Tell every event of the cluster's picture until `signal`; `gone` between two attempts. */
async function watch(tell, signal) {
  while (!signal.aborted) {
    try {
      const got = await asked("v1/trimmoe/live", { signal });
      for await (const event of eventsOf(got)) tell(event.name, JSON.parse(event.data));
      tell("gone", "");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return tell("key", error.message);
      tell("gone", error instanceof Refused ? error.message : "");
    }
    await pause(1000);
  }
}

/** Stream an answer to `turns`, or what follows them where a model has no form for chats; each piece
 * is given to `tell` as it comes. */
async function answer(turns, { chats, ...options }, tell, signal) {
  const body = {
    ...options,
    ...(chats ? { messages: turns } : { prompt: turns.map((turn) => turn.content).join("") }),
    stream: true,
    stream_options: { include_usage: true },
    return_token_traces: true,
  };
  const got = await asked(chats ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const { data } of eventsOf(got)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(0, chunk.error.message);
    const [choice] = chunk.choices;
    if (choice) {
      tell({
        text: (chats ? choice.delta.content : choice.text) ?? "",
        traces: choice.token_traces ?? [],
        reason: choice.finish_reason,
      });
    }
    if (chunk.usage) tell({ usage: chunk.usage });
  }
}
