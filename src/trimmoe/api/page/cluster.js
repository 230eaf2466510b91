// What is known of the cluster: figures, servers, who holds what, requests and routes.

/** Bytes a second that say nothing but that servers are there. */
const IDLE = 2000;

/** Bytes and tokens a second from two pictures. */
function speeds(before, now) {
  const passedS = before ? now.time_s - before.time_s : 0;
  const grown = (old, fresh) => (passedS > 0 ? Math.max(0, (fresh ?? 0) - (old ?? fresh ?? 0)) / passedS : 0);
  const rates = {};
  now.links.forEach((link, at) => {
    const rate = grown(before?.links[at]?.sent_bytes, link.sent_bytes);
    rates[`${link.source},${link.destination}`] = rate < IDLE ? 0 : rate;
  });
  // What a server that has just come back counts begins anew.
  const tokens = now.servers.map((server, at) => grown(before?.servers[at]?.tokens, server.tokens));
  return { rates, tokens, total: tokens.reduce((sum, one) => sum + one, 0) };
}

/** When servers came back, by their number: added to `known` from two pictures. */
function returned(known, before, now) {
  const fresh = { ...known };
  now.servers.forEach((server, at) => {
    const old = before?.servers[at];
    if (old && server.state === "up" && (old.state !== "up" || server.uptime_s < old.uptime_s - 1)) fresh[at] = now.time_s;
  });
  return fresh;
}

const NEWS_S = 60;

/** What is wrong with servers, or was a moment ago. */
function news(layout, now, back) {
  if (!now.ok) return now.reason;
  return layout.servers
    .map(({ name }, at) => {
      if (now.servers[at].state !== "up") return `${name} is ${STATES[now.servers[at].state]}`;
      const agoS = now.time_s - (back[at] ?? -Infinity);
      return agoS < NEWS_S ? `${name} came back ${Math.round(agoS)} s ago` : "";
    })
    .filter(Boolean)
    .join(", ");
}

const Spark = ({ values }) => {
  const most = Math.max(1, ...values);
  const at = (value, index) => `${((index / 59) * 120).toFixed(1)},${(27 - (24 * value) / most).toFixed(1)}`;
  const padded = [...Array(60 - values.length).fill(0), ...values];
  return html`<svg class="spark" viewBox="0 0 120 28" preserveAspectRatio="none" aria-hidden="true">
    <polyline points=${padded.map(at).join(" ")} />
  </svg>`;
};

const Figure = ({ label, value, more, children }) => html`
  <div class="figure"><dt>${label}</dt><dd>${value}${more && html`<small>${more}</small>`}${children}</dd></div>
`;

const spread = (times) =>
  times.count
    ? { value: seconds(times.p50), more: `p90\u00a0${seconds(times.p90)}, p99\u00a0${seconds(times.p99)}` }
    : { value: "–", more: "none lately" };

function Figures({ now, history }) {
  const { speed, policy } = now;
  const first = spread(speed.first_token_s);
  const each = spread(speed.per_token_s);
  const answers = now.servers.reduce((sum, server, at) => sum + (at === now.server ? now.running : server.running), 0);
  return html`
    <dl class="figures">
      <${Figure} label="Tokens a second" value=${(history.at(-1) ?? 0).toFixed(1)}><${Spark} values=${history} /><//>
      <${Figure} label="First token" value=${first.value} more=${first.more} />
      <${Figure} label="Token to token" value=${each.value} more=${each.more} />
      <${Figure} label="Under way" value=${answers} more=${now.waiting ? `${now.waiting} wait here` : "nobody waits"} />
      <${Figure} label="Policy" value=${policy.name} more=${policyWords(policy)} />
    </dl>
  `;
}

function policyWords(policy) {
  const words = [];
  if (policy.trims) words.push(`budget ${policy.budget}`);
  if (policy.guesses) words.push(policy.guessing ? "guessing" : "not guessing now");
  if (policy.guesses_made) words.push(`${percent(policy.guesses_right / policy.guesses_made)} right`);
  return words.join(", ") || "nothing is changed";
}

const Bar = ({ label, share, shown, warmth = "cool" }) => html`
  <div class="bar" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(100 * share)} aria-valuetext=${shown}>
    <span>${label}</span><b>${shown}</b>
    <i><i class=${warmth} style=${{ width: wide(share) }} /></i>
  </div>
`;

const STATES = { up: "up", starting: "restarting", lost: "lost", "left-out": "left out" };

const Card = ({ held, server, own }) => {
  const up = server.state === "up";
  const count = held.experts.reduce((sum, layer) => sum + layer.length, 0);
  return html`
    <li class="server-card ${server.state}">
      <h3><i class="state" />${held.name}${own && html`<small>yours</small>`}<small class="right">${
        up ? seconds(server.uptime_s) : STATES[server.state]
      }</small></h3>
      <${Bar} label="Experts" share=${held.expert_bytes / (held.room_bytes || 1)} shown=${`${count} · ${bytes(held.expert_bytes)}`} />
      <${Bar} label="Load" share=${server.busy} shown=${up ? percent(server.busy) : "–"} />
      <${Bar} label="Queue" share=${heat(server.waiting_s)} warmth=${warmth(server.waiting_s)} shown=${
        up ? `${server.queued} · ${seconds(server.waiting_s)}` : "–"
      } />
      <${Bar} label="Places" share=${server.kv_usage} shown=${up ? percent(server.kv_usage) : "–"} />
      <p class="dim">${up ? `${server.memory_bytes ? `process ${bytes(server.memory_bytes)}` : ""}${server.running ? ` · ${plural(server.running, "answer")}` : ""}` : "tokens go round it"}</p>
    </li>
  `;
};

/** Experts by server and layer, and the route of answers from here; arrow keys go about. */
function Heat({ layout, now, tip }) {
  const [cell, setCell] = useState(null);
  const box = useRef(null);
  const { servers, layers, experts } = layout;
  const left = 78;
  const across = (WIDE - left) / layers;
  const tall = 20;
  const high = servers.length * tall + 18;
  const route = now.routes[now.server];
  const words = (at, layer) => {
    const held = servers[at].experts[layer];
    return `${servers[at].name}, layer ${layer + 1}: ${held.length ? `expert${held.length > 1 ? "s" : ""} ${held.join(", ")}` : "no experts"} (${held.length} of ${experts})`;
  };
  const show = (next) => {
    setCell(next);
    const element = next && box.current?.querySelector(`[data-cell="${next}"]`);
    if (element) tip({ at: element.getBoundingClientRect(), body: html`<p>${words(...next)}</p>` });
    else tip(null);
  };
  const press = (event) => {
    const [at, layer] = cell ?? [now.server, -1];
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if (event.key === "Escape") return show(null);
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    show([within(at + move[0], servers.length), within(layer + move[1], layers)]);
  };
  const centre = (layer) => `${left + (layer + 0.5) * across},${route[layer] * tall + tall / 2}`;
  const found = (event) => event.target.dataset?.cell?.split(",").map(Number);
  return html`
    <svg ref=${box} class="heat" viewBox="0 0 ${WIDE} ${high}" tabindex="0" role="group"
      aria-label="Experts held by ${plural(servers.length, "server")} in ${plural(layers, "layer")}. Arrow keys go from cell to cell."
      onKeyDown=${press} onBlur=${() => show(null)} onPointerLeave=${() => show(null)}
      onPointerOver=${(event) => found(event) && show(found(event))}>
      ${servers.map(
        (held, at) => html`<g key=${held.name} class=${now.servers[at].state}>
          <text x=${left - 8} y=${at * tall + 14} class="row">${held.name}</text>
          ${held.experts.map(
            (some, layer) => html`<rect key=${layer} data-cell="${at},${layer}" x=${left + layer * across + 0.75} y=${at * tall + 1}
              width=${across - 1.5} height=${tall - 2} rx="2.5" fill-opacity=${(0.06 + (0.94 * some.length) / experts).toFixed(3)} />`,
          )}
        </g>`,
      )}
      ${route && html`<polyline class="route" points=${route.map((_, layer) => centre(layer)).join(" ")} />`}
      ${route && route.map((_, layer) => html`<circle key=${layer} class="stop" cx=${centre(layer).split(",")[0]} cy=${centre(layer).split(",")[1]} r="2.2" />`)}
      <text x=${left} y=${high - 3} class="axis">layer 1</text>
      <text x=${WIDE} y=${high - 3} class="axis last">${layers}</text>
    </svg>
    <p class="unseen" aria-live="polite">${cell ? words(...cell) : ""}</p>
  `;
}

const Requests = ({ now }) => html`
  <ul class="requests">
    ${now.requests.length === 0 && html`<li class="dim">None here.</li>`}
    ${now.requests.slice(0, 6).map(
      (one, at) => html`<li key=${at}><b>${one.state}</b>
        <span>${one.tokens} of ${plural(one.most_tokens, "token")}</span>
        <span class="dim">prompt ${one.prompt_tokens}${one.cached_tokens ? `, ${one.cached_tokens} kept` : ""}</span>
        <span class="dim">${seconds(one.age_s)}</span></li>`,
    )}
    ${now.running + now.waiting > 6 && html`<li class="dim">and ${now.running + now.waiting - 6} more</li>`}
  </ul>
`;

const Routes = ({ layout, now }) => html`
  <ul class="routes">
    ${now.routes.map((route, at) => html`<li key=${at}><b>${layout.servers[at].name}</b>
      <span class="dim">${route ? runs(route).map(([first, last, server]) => `${layout.servers[server].name} ${first + 1}–${last + 1}`).join(" → ") : "none"}</span></li>`)}
  </ul>
`;

function Cluster({ layout, now, before, history, back, gone, tip }) {
  const { rates, tokens } = speeds(before, now);
  return html`
    <p class="news" role="status">${gone ?? news(layout, now, back)}</p>
    <${Figures} now=${now} history=${history} />
    <${Graph} layout=${layout} now=${now} rates=${rates} tokens=${tokens} />
    <h2>Experts held, by layer <small>the line is the way of answers from here</small></h2>
    <${Heat} layout=${layout} now=${now} tip=${tip} />
    <h2>Servers</h2>
    <ul class="servers">${layout.servers.map((held, at) => html`<${Card} key=${held.name} held=${held} server=${now.servers[at]} own=${at === now.server} />`)}</ul>
    <div class="pair">
      <section><h2>Requests</h2><${Requests} now=${now} /></section>
      <section><h2>Routes <small>by user’s server, layers</small></h2><${Routes} layout=${layout} now=${now} /></section>
    </div>
  `;
}
