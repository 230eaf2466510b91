// An answer's tokens, coloured by what became of them, with their layers on demand.

const Legend = () => html`
  <ul class="legend" aria-label="What colours say of a token">
    ${Object.entries(FATES).map(
      ([fate, meaning]) => html`<li key=${fate} title=${meaning}><i class="dot ${fate}" />${fate}</li>`,
    )}
  </ul>
`;

/** What is known of a token, in words. */
function described(token) {
  const trace = token.traces.at(-1);
  if (!trace) return `“${spaced(token.text)}”`;
  const counts = {};
  for (const letter of trace.layers) counts[LAYERS[letter][1]] = (counts[LAYERS[letter][1]] ?? 0) + 1;
  const layers = Object.entries(counts).map(([word, count]) => `${count} ${word}`);
  const parts = [`“${spaced(token.text)}” ${trace.became}: ${FATES[trace.became]}`];
  if (layers.length) parts.push(`layers: ${layers.join(", ")}`);
  if (trace.hops) parts.push(plural(trace.hops, "hop"));
  return parts.join("; ");
}

/** The card of one token. */
const Layers = ({ token }) => {
  const trace = token.traces.at(-1);
  if (!trace) return null;
  const facts = [];
  if (trace.hops) facts.push(plural(trace.hops, "hop"));
  if (trace.expected_delay_s) facts.push(`${seconds(trace.expected_delay_s)} expected`);
  if (trace.budget_spent) facts.push(`${trace.budget_spent.toPrecision(2)} of the budget spent`);
  return html`
    <p class="card-head">
      <b>${spaced(token.text) || " "}</b><i class="dot ${trace.became}" />${trace.became}
      ${trace.ahead && trace.became !== "guessed" && html`<span class="dim">${AHEAD[trace.ahead]}</span>`}
    </p>
    ${trace.layers
      ? html`<ol class="strip">
            ${[...trace.layers].map((one, at) => html`<li key=${at} class=${LAYERS[one][0]} />`)}
          </ol>
          <p class="ends"><span>layer 1</span><span>${trace.layers.length}</span></p>`
      : html`<p class="dim">${FATES[trace.became]}</p>`}
    ${trace.withdrawn.length > 0 &&
    html`<p class="dim">withdrawn: <del>${spaced(trace.withdrawn.join(""))}</del></p>`}
    ${facts.length > 0 && html`<p class="dim">${facts.join(" · ")}</p>`}
  `;
};

/** The tokens of an answer; arrow keys go from one to the next. */
function Tokens({ tokens, busy, tip }) {
  const [chosen, choose] = useState(-1);
  const box = useRef(null);
  const show = (at) => {
    const element = box.current?.querySelector(`[data-at="${at}"]`);
    if (element) tip({ at: element.getBoundingClientRect(), body: html`<${Layers} token=${tokens[at]} />` });
  };
  const pick = (at) => {
    const next = Math.max(0, Math.min(tokens.length - 1, at));
    choose(next);
    show(next);
  };
  const leave = () => {
    choose(-1);
    tip(null);
  };
  const press = (event) => {
    const steps = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: tokens.length };
    if (event.key === "Escape") leave();
    else if (event.key in steps) pick(steps[event.key]);
    else return;
    event.preventDefault();
  };
  const found = (event) => event.target.dataset?.at;
  return html`
    <div
      ref=${box}
      class="tokens ${busy ? "busy" : ""}"
      tabindex="0"
      role="group"
      aria-label="Answer. Arrow keys go from token to token."
      onKeyDown=${press}
      onBlur=${leave}
      onPointerOver=${(event) => found(event) && show(Number(found(event)))}
      onPointerLeave=${() => chosen < 0 && tip(null)}
      onClick=${(event) => found(event) && pick(Number(found(event)))}
    >
      ${tokens.map((token, at) => {
        const fate = token.traces.at(-1)?.became ?? "prompt";
        return html`<span key=${at} data-at=${at} class="token ${fate} ${at === chosen ? "chosen" : ""}">${token.text}</span>`;
      })}
    </div>
    <p class="unseen" aria-live="polite">${chosen >= 0 && tokens[chosen] ? described(tokens[chosen]) : ""}</p>
  `;
}
