// A small client of INFaaS for Node.js: queries over NATS, bodies in MessagePack (docs/contract.md, section 2).
//
//   const client = await connect("nats://user:password@localhost:4222");
//   const answer = await client.query("digits", tensor(new Float32Array(784), [1, 784]), { accuracy: 0.9, latency_ms: 1000 });
//   console.log(answer.variant, answer.outputs.scores.data);
//   await client.close();

import { randomBytes } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { connect as connectNats, createInbox, headers } from "@nats-io/transport-node";

const SILENCE_MS = 1500; // without a reply, after which a query is sent again with the same key; doubles each time
const PAUSE_MS = 100; // before the next try where no service listens
const TYPES = {
  BOOL: Uint8Array, INT8: Int8Array, INT16: Int16Array, INT32: Int32Array, INT64: BigInt64Array, UINT8: Uint8Array, UINT16: Uint16Array,
  UINT32: Uint32Array, UINT64: BigUint64Array, FP32: Float32Array, FP64: Float64Array,
};

/** A refusal of the system. code: as docs/errors.md lists them. closest: the nearest offer. retryAfterMs: when a later try may succeed. */
export class Refused extends Error {
  constructor({ code, message, closest, retry_after_ms }) {
    super(`${code}: ${message}`);
    Object.assign(this, { name: "Refused", code, closest, retryAfterMs: retry_after_ms });
  }
}

/** A tensor of a typed array, or of texts. shape: its first axis counts items. */
export function tensor(data, shape, datatype) {
  const count = shape.reduce((a, b) => a * b, 1);
  if (data.length !== count) throw new RangeError(`data has ${data.length} elements: shape [${shape}] needs ${count}`);
  if (Array.isArray(data) && data.every((one) => typeof one === "string")) return { datatype: "BYTES", shape, data: packed(data) };
  const name = datatype ?? Object.keys(TYPES).find((one) => one !== "BOOL" && data instanceof TYPES[one]);
  if (!name) throw new TypeError("data must be a typed array, as Float32Array, or a list of texts");
  return { datatype: name, shape, data: new Uint8Array(data.buffer, data.byteOffset, data.byteLength) };
}

/** Connects. url: as `infaas up` prints it; user and password are taken from it. options: more for NATS, as `tls` or `inboxPrefix`. */
export async function connect(url, options = {}) {
  const servers = url.split(",").map((one) => new URL(one.includes("://") ? one : `nats://${one}`));
  const { username, password } = servers[0];
  const login = username ? { user: decodeURIComponent(username), pass: decodeURIComponent(password) } : {};
  const hosts = servers.map((one) => `${one.hostname}:${one.port || 4222}`); // NATS for JavaScript reads no user from a URL
  const { prefix = "infaas", ...others } = options;
  return new Client(await connectNats({ servers: hosts, name: "infaas.mjs", ...login, ...others }), prefix, others.inboxPrefix);
}

class Client {
  constructor(connection, prefix, inboxPrefix) {
    Object.assign(this, { connection, prefix, inboxPrefix });
  }

  /** One query. inputs: a tensor, a map of input names to tensors, or nested lists. needs: latency_ms, accuracy, cost, model, ...;
   *  timeoutMs: how long to wait for a reply (30 s). Gives the answer, whose outputs have typed arrays. Throws Refused. */
  async query(app, inputs, { timeoutMs = 30_000, ...needs } = {}) {
    const deadline = Date.now() / 1000 + timeoutMs / 1000; // nobody computes an answer that nobody waits for
    const answer = await this.#ask(`query.${app}`, { deadline, ...needs, inputs, retry_key: randomBytes(16) }, timeoutMs);
    if (answer.outputs_ref) throw new RangeError("the answer is too large for one message: ask over HTTP (docs/gateway.md)");
    const outputs = Object.entries(answer.outputs).map(([name, one]) => [name, { ...one, data: unpacked(one) }]);
    return { ...answer, outputs: Object.fromEntries(outputs) };
  }

  /** What there is: "apps", "models", "variants", "workers" or "jobs". */
  async list(what, filter = {}) {
    return (await this.#ask(`list.${what}`, filter, 10_000)).items;
  }

  /** The decision that a query with these needs would get now. */
  async explain(app, needs = {}) {
    return this.#ask(`explain.${app}`, needs, 10_000);
  }

  async close() {
    await this.connection.drain();
  }

  /** The first reply. The request is sent again where it may have been lost: its key makes it the same query. */
  async #ask(subject, body, timeoutMs) {
    const message = encode(body, { ignoreUndefined: true });
    const most = this.connection.info.max_payload;
    if (message.length > most) throw new RangeError(`the query has ${message.length} bytes, NATS takes ${most}: ask over HTTP (docs/gateway.md)`);
    const reply = createInbox(this.inboxPrefix);
    const began = Date.now(), ends = began + timeoutMs;
    let silence = SILENCE_MS, lost = false, timer;
    return new Promise((resolve, reject) => {
      const send = () => {
        if (Date.now() >= ends) return end(reject, new Error(`no reply on ${this.prefix}.${subject} within ${timeoutMs} ms`));
        const marks = lost ? headers() : undefined; // who has it, or has answered it, is asked first
        marks?.set("Infaas-Resent", String(Date.now() - began));
        this.connection.publish(`${this.prefix}.${subject}`, message, { reply, headers: marks });
        lost = true;
        timer = setTimeout(send, Math.min(silence, Math.max(1, ends - Date.now())));
        silence *= 2;
      };
      const end = (settle, value) => {
        clearTimeout(timer);
        subscription.unsubscribe();
        settle(value);
      };
      const subscription = this.connection.subscribe(reply, {
        callback: (error, received) => {
          if (error) return end(reject, error);
          if (received.headers?.code === 503) { // nobody listens now
            clearTimeout(timer);
            lost = false;
            timer = setTimeout(send, PAUSE_MS);
            return;
          }
          const found = decode(received.data);
          if (found.error) end(reject, new Refused(found.error));
          else end(resolve, found);
        },
      });
      send();
    });
  }
}

function packed(texts) { // each text after its length in bytes
  const encoder = new TextEncoder();
  return Buffer.concat(texts.flatMap((text) => {
    const bytes = encoder.encode(text), length = Buffer.alloc(4);
    length.writeUInt32LE(bytes.length);
    return [length, bytes];
  }));
}

function unpacked({ datatype, data }) {
  if (!(data instanceof Uint8Array)) return data; // nested lists
  if (datatype === "BYTES") {
    const texts = [], view = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
    for (let at = 0; at < view.length; ) {
      const length = view.readUInt32LE(at);
      texts.push(view.toString("utf8", at + 4, at + 4 + length));
      at += 4 + length;
    }
    return texts;
  }
  const type = TYPES[datatype] ?? Uint8Array; // FP16 and BF16 stay bytes
  return new type(Uint8Array.from(data).buffer); // a copy, which begins where its type may
}
