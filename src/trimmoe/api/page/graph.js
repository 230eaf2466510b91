// Servers in a ring and the links between them.

const WIDE = 640;
const CROWD = 6;
const RING = 27;

/** How high a picture of so many servers is. */
const highOf = (count) => (count > CROWD ? 380 : 264);

/** Where server `at` of `count` stands. */
function place(at, count) {
  const high = highOf(count);
  if (count === 1) return { x: WIDE / 2, y: high / 2 };
  const turn = count === 2 ? Math.PI : count === 4 ? (-3 * Math.PI) / 4 : -Math.PI / 2;
  const angle = turn + (2 * Math.PI * at) / count;
  const stretch = count === 4 ? Math.SQRT2 * 0.92 : 1;
  return {
    x: WIDE / 2 + Math.cos(angle) * (WIDE / 2 - (count > CROWD ? 50 : 90)) * stretch,
    y: high / 2 - 12 + Math.sin(angle) * (high / 2 - 56) * stretch,
  };
}

/** How hot a wait is, 0..1: a millisecond is nothing, a second is all. */
const heat = (waitS) => Math.min(1, Math.max(0, Math.log10(Math.max(waitS, 1e-3) / 1e-3) / 3));

/** The class of that heat. */
const warmth = (waitS) => ["cool", "cool", "warm", "hot"][Math.min(3, Math.floor(4 * heat(waitS)))];

const arc = (share) => `${(2 * Math.PI * RING * Math.min(1, share)).toFixed(1)} 999`;

const Server = ({ held, server, at, own, spot, tokens }) => {
  const up = server.state === "up";
  const state = server.state.replace("-", " ");
  const inside = up ? percent(server.busy) : state;
  return html`
    <g class="server ${server.state}" transform="translate(${spot.x} ${spot.y})">
      <title>${held.name}: ${up ? `${percent(server.busy)} busy, work waits ${seconds(server.waiting_s)}` : state}</title>
      ${own && html`<circle class="own" r=${RING + 7} />`}
      <circle class="track" r=${RING} />
      <circle class="busy ${up && server.busy >= 0.01 ? warmth(server.waiting_s) : ""}" r=${RING} stroke-dasharray=${arc(up ? server.busy : 0)} transform="rotate(-90)" />
      <text class="inside" y="4">${inside}</text>
      <text class="name" y=${RING + 19}>${held.name}</text>
      ${up && tokens >= 0.1 && html`<text class="under" y=${RING + 33}>${tokens.toFixed(1)} tokens/s</text>`}
    </g>
  `;
};

/** One pair of servers: both directions, what they carry and how long they take. */
const Link = ({ a, b, links, rates, labelled }) => {
  const long = Math.hypot(b.x - a.x, b.y - a.y);
  const [ux, uy] = [(b.x - a.x) / long, (b.y - a.y) / long];
  const end = (spot, way, side) => `${spot.x + ux * way - uy * side} ${spot.y + uy * way + ux * side}`;
  const up = links.every((link) => link.up);
  const rate = rates[0] + rates[1];
  const delay = links.map((link) => link.delay_s).find((value) => value !== null);
  const lines = links.map((link, way) => {
    const side = way ? -2.5 : 2.5;
    const ends = [end(a, RING + 8, side), end(b, -RING - 8, side)];
    if (way) ends.reverse();
    const width = rates[way] ? 1.2 + Math.min(4, Math.log10(1 + rates[way] / 200)) : 1;
    const kind = !up ? "cut" : rates[way] ? "flow" : "";
    return html`<path key=${way} class="link ${kind}" d="M${ends[0]} L${ends[1]}" stroke-width=${width} />`;
  });
  // Where diagonals cross, nobody could read both.
  const share = a.x === b.x || Math.abs(a.y - b.y) < 1 ? 0.5 : 0.33;
  return html`
    <g>
      <title>${seconds(delay ?? links[0].planned_delay_s)}${delay === undefined ? " planned" : ""}, ${bytes(rate)} a second</title>
      ${lines}
      ${up && labelled &&
      html`<text class="label" x=${a.x + (b.x - a.x) * share} y=${a.y + (b.y - a.y) * share + (rate ? -2 : 4)}>
        <tspan>${seconds(delay ?? links[0].planned_delay_s)}</tspan>
        ${rate > 0 && html`<tspan class="rate" x=${a.x + (b.x - a.x) * share} dy="13">${bytes(rate)}/s</tspan>`}
      </text>`}
    </g>
  `;
};

/** The picture; `rates` are bytes a second by `source,destination`, `tokens` a second by server. */
function Graph({ layout, now, rates, tokens }) {
  const servers = layout.servers;
  const spots = servers.map((_, at) => place(at, servers.length));
  const pairs = now.links.filter((link) => link.source < link.destination);
  const back = new Map(now.links.map((link) => [`${link.source},${link.destination}`, link]));
  const told = servers.map((held, at) => `${held.name} ${now.servers[at].state.replace("-", " ")}`).join(", ");
  return html`
    <svg class="graph" viewBox="0 0 ${WIDE} ${highOf(servers.length)}" role="img" aria-label="Servers and links: ${told}">
      ${pairs.map((link) => {
        const key = `${link.source},${link.destination}`;
        const turned = `${link.destination},${link.source}`;
        return html`<${Link} key=${key} a=${spots[link.source]} b=${spots[link.destination]}
          links=${[link, back.get(turned)]} rates=${[rates[key] ?? 0, rates[turned] ?? 0]}
          labelled=${servers.length <= CROWD} />`;
      })}
      ${servers.map(
        (held, at) => html`<${Server} key=${held.name} held=${held} server=${now.servers[at]} at=${at}
          own=${at === now.server} spot=${spots[at]} tokens=${tokens[at] ?? 0} />`,
      )}
    </svg>
  `;
}
