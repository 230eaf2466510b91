// The conversation: turns, what is asked for, and what became of each answer.

const STARTERS = [
  "Write one sentence about a lighthouse.",
  "Tell a short story about a fox.",
  "What is the sea?",
];

/** The answer with another piece of it. */
function grown(turn, piece, nowS) {
  if (piece.usage) return { ...turn, usage: piece.usage };
  const next = { ...turn, reason: piece.reason ?? turn.reason };
  if (piece.traces.length) {
    next.made = turn.made + piece.traces.length;
    next.firstS = turn.firstS ?? nowS;
    next.lastS = nowS;
  }
  if (!piece.text) {
    next.held = [...turn.held, ...piece.traces];
    return next;
  }
  // Text may come later than its tokens: parts of characters wait for their rest.
  next.tokens = [...turn.tokens, { text: piece.text, traces: [...turn.held, ...piece.traces] }];
  next.text = turn.text + piece.text;
  next.held = [];
  return next;
}

/** What an answer took and what became of it, in a few words each. */
function account(turn) {
  const facts = [];
  const made = turn.usage?.completion_tokens ?? turn.made;
  if (turn.firstS) facts.push(`${plural(made, "token")}, the first after ${seconds(turn.firstS)}`);
  if (turn.made > 1 && turn.lastS > turn.firstS) {
    facts.push(`${((turn.made - 1) / (turn.lastS - turn.firstS)).toFixed(1)} a second`);
  }
  const told = turn.usage?.trimmoe;
  if (told) {
    const layers = told.layers_executed + told.layers_skipped + told.layers_exited;
    const share = (count) => percent(count / (layers || 1));
    facts.push(`layers ${share(told.layers_executed - told.layers_remote)} local, ${share(told.layers_remote)} remote`);
    for (const [count, word] of [
      [told.layers_substituted, "with substitutes"],
      [told.layers_stood_in, "with stand-ins"],
      [told.layers_skipped, "skipped"],
      [told.layers_exited, "exited"],
    ]) {
      if (count) facts.push(`${share(count)} ${word}`);
    }
    facts.push(`${plural(told.hops, "hop")}, ${bytes(told.bytes)}`);
    if (told.budget_spent) facts.push(`budget spent ${told.budget_spent.toPrecision(2)} of ${told.budget_credited.toPrecision(2)}`);
  }
  const traces = turn.tokens.flatMap((token) => token.traces);
  const guessed = traces.filter((trace) => trace.became === "guessed").length;
  const withdrawn = traces.reduce((sum, trace) => sum + trace.withdrawn.length, 0);
  if (guessed || withdrawn) facts.push(`${guessed} guessed, ${withdrawn} withdrawn`);
  const cached = turn.usage?.prompt_tokens_details.cached_tokens;
  if (cached) facts.push(`${cached} of ${turn.usage.prompt_tokens} tokens of the prompt not read again`);
  if (turn.forgot) facts.push("the context is full: the oldest turns were left out");
  if (turn.stopped) facts.push("stopped");
  return facts;
}

/** The turns and how to go on with them. */
function useTurns(model, options, onKey) {
  const [turns, setTurns] = useState([]);
  const [busy, setBusy] = useState(null);
  const last = (change) => setTurns((all) => [...all.slice(0, -1), change(all.at(-1))]);
  const run = async (before) => {
    const stop = new AbortController();
    const begunMs = performance.now();
    setTurns([...before, { role: "assistant", text: "", tokens: [], held: [], made: 0 }]);
    setBusy(stop);
    let told = before.map(({ role, text }) => ({ role, content: text }));
    const tell = (piece) => last((turn) => grown(turn, piece, (performance.now() - begunMs) / 1000));
    const ask = () => answer(told, { model: model.id, chats: model.chats, ...options }, tell, stop.signal);
    const forgotten = (error) => {
      // The oldest turn goes where the context does not hold them all.
      if (error.status !== 400 || !error.message.includes("context") || told.length < 3) throw error;
      told = told.slice(2);
      last((turn) => ({ ...turn, forgot: true }));
      return ask().catch(forgotten);
    };
    try {
      await ask().catch(forgotten);
    } catch (error) {
      if (stop.signal.aborted) last((turn) => ({ ...turn, stopped: true }));
      else last((turn) => ({ ...turn, error: error.message || "The answer broke off; try again." }));
      if (error.status === 401) onKey();
    }
    setBusy(null);
  };
  const said = turns.filter((turn) => turn.role === "user" || turn.text);
  return {
    turns,
    busy: busy !== null,
    stop: () => busy?.abort(),
    send: (text) => run([...said, { role: "user", text }]),
    again: () => run(said.slice(0, said.findLastIndex((turn) => turn.role === "user") + 1)),
    forget: () => {
      busy?.abort();
      setTurns([]);
    },
  };
}

const Turn = ({ turn, isLast, talk, tip }) => {
  if (turn.role === "user") return html`<article class="turn mine"><p>${turn.text}</p></article>`;
  const busy = isLast && talk.busy;
  return html`
    <article class="turn" aria-busy=${busy}>
      <${Tokens} tokens=${turn.tokens} busy=${busy} tip=${tip} />
      ${turn.error && html`<p class="wrong" role="alert">${turn.error}</p>`}
      ${!busy && html`<p class="account">${account(turn).map((fact, at) => html`<span key=${at}>${fact}</span>`)}</p>`}
      ${isLast && !busy && html`<button class="quiet" onClick=${talk.again}>Regenerate</button>`}
    </article>
  `;
};

const Slider = ({ label, value, shown, children, ...rest }) => html`
  <div class="slider">
    <span>${label}${children}<b>${shown}</b></span>
    <input type="range" aria-label=${label} aria-valuetext=${shown} value=${value} ...${rest} />
  </div>
`;

/** What answers are asked for with. */
function Options({ wish, setWish, policy, most }) {
  const set = (name, scale = 1) => (event) => setWish({ ...wish, [name]: Number(event.target.value) / scale });
  const own = wish.budget === null;
  const budget = own ? (policy?.budget ?? 0) : wish.budget;
  const idle = policy && !policy.trims && !wish.exact;
  return html`
    <div class="options">
      <${Slider}
        label="Quality budget"
        min="0" max="100" step="1"
        value=${Math.round(budget * 500)}
        shown=${wish.exact ? "none: exact" : own ? `${budget} (the server’s)` : budget.toFixed(3)}
        disabled=${wish.exact}
        onInput=${set("budget", 500)}
      >${!own && !wish.exact && html`<button class="quiet" onClick=${() => setWish({ ...wish, budget: null })}>the server’s</button>`}<//>
      <label class="switch">
        <input type="checkbox" role="switch" checked=${wish.exact}
          onChange=${(event) => setWish({ ...wish, exact: event.target.checked })} />
        Exact
      </label>
      <${Slider} label="Temperature" min="0" max="150" step="5" value=${wish.temperature * 100}
        shown=${wish.temperature.toFixed(2)} onInput=${set("temperature", 100)} />
      <${Slider} label="At most" min="16" max=${most} step="16" value=${wish.most}
        shown=${plural(Math.min(most, wish.most), "token")} onInput=${set("most")} />
      ${idle && html`<p class="dim">The policy in force changes nothing, whatever the budget; a server started with --budget trims.</p>`}
    </div>
  `;
}

function Chat({ model, policy, reason, onKey, tip }) {
  const [wish, setWish] = useState({ budget: null, exact: false, temperature: 0.7, most: 128 });
  const [text, setText] = useState("");
  const most = Math.min(1024, Math.max(16, (model?.context_length ?? 1024) >> 1));
  const options = { temperature: wish.temperature, max_tokens: Math.min(most, wish.most) };
  if (wish.exact) options.exact = true;
  else if (wish.budget !== null) options.quality_budget = wish.budget;
  const talk = useTurns(model, options, onKey);
  const box = useRef(null);
  const near = useRef(true);
  const field = useRef(null);
  useEffect(() => {
    if (near.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [talk.turns]);
  const send = (given) => {
    const asked = (given ?? text).trim();
    if (!asked || talk.busy || !model) return;
    near.current = true;
    setText("");
    talk.send(asked);
    field.current?.focus();
  };
  const press = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  const scrolled = ({ target }) => (near.current = target.scrollHeight - target.scrollTop - target.clientHeight < 60);
  return html`
    <div class="turns" ref=${box} onScroll=${scrolled} tabindex="-1">
      ${talk.turns.length === 0 &&
      html`<div class="empty">
        <h2>Ask something</h2>
        <p class="dim">Every word of the answer is coloured by what became of it on its way through the servers.</p>
        <p class="starters">${STARTERS.map((one) => html`<button key=${one} disabled=${!model} onClick=${() => send(one)}>${one}</button>`)}</p>
      </div>`}
      ${talk.turns.map(
        (turn, at) => html`<${Turn} key=${at} turn=${turn} isLast=${at === talk.turns.length - 1} talk=${talk} tip=${tip} />`,
      )}
    </div>
    <${Legend} />
    <form class="composer" onSubmit=${(event) => (event.preventDefault(), send())}>
      <textarea ref=${field} rows="2" value=${text} placeholder=${reason || (model?.chats === false ? "Write how a text begins" : "Write a message")} aria-label="Message"
        onInput=${(event) => setText(event.target.value)} onKeyDown=${press} />
      <div class="actions">
        ${talk.busy
          ? html`<button type="button" class="main" onClick=${talk.stop}>Stop</button>`
          : html`<button type="submit" class="main" disabled=${!model || !text.trim()}>Send</button>`}
        <button type="button" class="quiet" disabled=${talk.turns.length === 0} onClick=${talk.forget}>New chat</button>
      </div>
    </form>
    <${Options} wish=${wish} setWish=${setWish} policy=${policy} most=${most} />
  `;
}
