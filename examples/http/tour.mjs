// Write, watch and work, with what Node has. Usage: HTTP=http://127.0.0.1:4000 node tour.mjs
const base = process.env.HTTP ?? "http://127.0.0.1:4000";
const topic = `tour-node-${process.pid}`;

async function call(method, path, body) {
  const headers = { "content-type": "application/json" };
  if (process.env.KEY) headers.authorization = `Bearer ${process.env.KEY}`;
  const reply = await fetch(base + path, { method, headers, body: body && JSON.stringify(body) });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(`${reply.status} ${answer.error.code}: ${answer.error.message}`);
  return answer;
}

async function* events(path) {
  const headers = { accept: "text/event-stream" };
  if (process.env.KEY) headers.authorization = `Bearer ${process.env.KEY}`;
  const reply = await fetch(base + path, { headers });
  let text = "";
  for await (const piece of reply.body.pipeThrough(new TextDecoderStream())) {
    text += piece;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const lines = text.slice(0, end).split("\n").map((line) => line.split(/: ?(.*)/s));
      const fields = Object.fromEntries(lines);
      if (fields.event) yield { event: fields.event, data: JSON.parse(fields.data) };
    }
  }
}

const wrote = await call("POST", `/v0/topics/${topic}`, { records: [{ data: { id: 1 } }, { data: { id: 2 } }] });
console.log("wrote", wrote.seqs);

const watch = await call("POST", "/v0/watch", { topics: { [topic]: { from_seq: 0 } } });
for await (const { event, data } of events(watch.stream_url)) {
  if (event === "record") for (const record of data.records) console.log("read", record.data.id);
  if (event === "caught-up") break;
}

const jobs = `${topic}-jobs`;
await call("PUT", `/v0/topics/${jobs}`, { type: "queue" });
await call("POST", `/v0/topics/${jobs}`, { records: [{ data: "mail" }] });
const { claimed } = await call("POST", `/v0/topics/${jobs}/claim`, { node: "w1", max: 8, wait_ms: 1000 });
const { acked } = await call("POST", `/v0/topics/${jobs}/ack`, { node: "w1", seqs: claimed.map((job) => job.$seq) });
console.log("acked", acked);
process.exit(0);
