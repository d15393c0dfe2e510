// node query.mjs [APP]: asks an app for an answer to zeros, and prints it. INFAAS_NATS_URL: as `infaas up` prints it.

import { Refused, connect, tensor } from "./infaas.mjs";

const TYPES = { FP32: Float32Array, FP64: Float64Array, INT64: BigInt64Array, INT32: Int32Array, UINT8: Uint8Array };
const client = await connect(process.env.INFAAS_NATS_URL ?? "nats://localhost:4222");
try {
  const apps = await client.list("apps");
  const app = apps.find((one) => one.app === (process.argv[2] ?? apps[0]?.app));
  if (!app) throw new Error(`there is no such app: ${apps.map((one) => one.app).join(", ") || "register a model first"}`);
  const inputs = {};
  for (const { name, datatype, shape } of app.inputs) {
    const size = [1, ...shape.map((length) => (length < 0 ? 8 : length))]; // one item
    const count = size.reduce((a, b) => a * b, 1);
    inputs[name] = datatype === "BYTES" ? tensor(Array(count).fill("some text"), size) : tensor(new TYPES[datatype](count), size);
  }
  const answer = await client.query(app.app, inputs, { latency_ms: 10_000 });
  console.log(`${answer.variant} answered in ${answer.latency_ms.toFixed(1)} ms`);
  for (const [name, { shape, data }] of Object.entries(answer.outputs)) console.log(name, shape, data);
} catch (error) {
  console.error(error.message);
  if (error instanceof Refused && error.retryAfterMs) console.error(`Try again in ${error.retryAfterMs} ms.`);
  process.exitCode = 1;
} finally {
  await client.close();
}
