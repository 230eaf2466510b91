// The page: chat on one side, cluster on the other.

/** The cluster's picture, followed while the page is seen. */
function useCluster(attempt, onKey) {
  const [seen, setSeen] = useState({ history: [], back: {} });
  useEffect(() => {
    let stop = new AbortController();
    const tell = (name, data) => {
      if (name === "key") return onKey(data);
      setSeen((old) => {
        if (name === "layout") return { ...old, model: data.model, layout: data.cluster, now: null, before: null };
        if (name === "now") {
          const total = speeds(old.now, data).total;
          return { ...old, gone: null, before: old.now, now: data, back: returned(old.back, old.now, data), history: [...old.history, total].slice(-60) };
        }
        if (name === "end") return old;
        return { ...old, gone: data.message || data || "This server does not answer; trying again." };
      });
    };
    const follow = () => {
      stop.abort();
      stop = new AbortController();
      if (!document.hidden) watch(tell, stop.signal);
    };
    follow();
    document.addEventListener("visibilitychange", follow);
    return () => {
      stop.abort();
      document.removeEventListener("visibilitychange", follow);
    };
  }, [attempt]);
  return seen;
}

function KeyDialog({ why, done }) {
  const dialog = useRef(null);
  const [key, setKey] = useState(keptKey());
  useEffect(() => {
    if (why !== null) dialog.current.showModal();
  }, [why]);
  const close = (kept) => {
    if (kept) keepKey(key.trim());
    dialog.current.close();
    done(kept);
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="key-title" onCancel=${() => done(false)}>
      <form onSubmit=${(event) => (event.preventDefault(), close(true))}>
        <h2 id="key-title">API key</h2>
        <p class="dim">${why || "It is kept in this tab until that is closed, and sent to this server only."}</p>
        <input type="password" autocomplete="off" aria-label="API key" value=${key} onInput=${(event) => setKey(event.target.value)} />
        <p class="actions"><button type="submit" class="main">Use it</button>
          <button type="button" class="quiet" onClick=${() => close(false)}>Cancel</button></p>
      </form>
    </dialog>
  `;
}

/** What is said of the thing that is pointed at. */
const Tip = ({ tip }) => {
  if (!tip) return null;
  const wide = Math.min(320, innerWidth - 16);
  const left = Math.max(8, Math.min(innerWidth - wide - 8, tip.at.left - 12));
  const above = tip.at.bottom > innerHeight - 180;
  const where = above ? { bottom: `${innerHeight - tip.at.top + 6}px` } : { top: `${tip.at.bottom + 6}px` };
  return html`<aside class="tip" aria-hidden="true" style=${{ left: `${left}px`, width: `${wide}px`, ...where }}>${tip.body}</aside>`;
};

const VIEWS = ["Chat", "Cluster"];

const Header = ({ model, layout, now, gone, view, setView, ask }) => {
  const well = now?.ok && !gone && now.servers.every((server) => server.state === "up");
  const state = !now ? "connecting" : gone ? "no answer" : well ? "all up" : "disturbed";
  return html`
    <header>
      <h1><svg viewBox="0 0 16 16" aria-hidden="true"><rect x="1" y="2" width="14" height="3" rx="1.5" /><rect x="1" y="6.5" width="8" height="3" rx="1.5" /><rect x="1" y="11" width="11" height="3" rx="1.5" /></svg>TrimMoE</h1>
      ${model && html`<p class="model">${model.id}${layout.servers.length > 1 && html`<span class="dim"> at ${layout.servers[now?.server ?? 0].name}</span>`}</p>`}
      <p class="health ${state.replace(" ", "-")}" role="status"><i class="state" />${state}</p>
      <nav aria-label="Views">
        ${VIEWS.map((name) => html`<button key=${name} aria-pressed=${view === name} onClick=${() => setView(name)}>${name}</button>`)}
      </nav>
      <button class="quiet" onClick=${ask}>API key</button>
    </header>
  `;
};

function App() {
  const [view, setView] = useState("Chat");
  const [why, setWhy] = useState(null);
  const [attempt, setAttempt] = useState(0);
  const [tip, setTip] = useState(null);
  const { model, layout, now, before, history, back, gone } = useCluster(attempt, setWhy);
  const there = layout && now;
  return html`
    <${Header} model=${model} layout=${layout} now=${now} gone=${gone} view=${view} setView=${setView} ask=${() => setWhy("")} />
    <main class="shows-${view.toLowerCase()}">
      <section class="chat" aria-label="Chat">
        <${Chat} model=${model} policy=${now?.policy} reason=${now && !now.ok ? now.reason : ""} onKey=${() => setWhy("The server wants another key.")} tip=${setTip} />
      </section>
      <section class="cluster" aria-label="Cluster">
        ${there
          ? html`<${Cluster} layout=${layout} now=${now} before=${before} history=${history} back=${back} gone=${gone} tip=${setTip} />`
          : html`<p class="dim waiting">Looking for the cluster …</p>`}
      </section>
    </main>
    <${Tip} tip=${tip} />
    <${KeyDialog} why=${why} done=${(kept) => {
      setWhy(null);
      if (kept) setAttempt(attempt + 1);
    }} />
  `;
}

render(html`<${App} />`, document.getElementById("page"));
