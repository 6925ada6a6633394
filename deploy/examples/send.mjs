// Writes one event with fetch, and repeats the request itself.
//
//     FENCEPOST_URL=http://127.0.0.1:8000 node deploy/examples/send.mjs order-1 [TOPIC]

const GIVE_UP_MS = 60_000;
const FIRST_PAUSE_MS = 200;
const PAUSE_MAX_MS = 5_000;
// The event is not written, or may be: the next request with the same key tells. All other answers are final.
const RETRIED = new Set([408, 409, 429, 500, 502, 503, 504]);

/** Sends an event until the answer is final. Throws after GIVE_UP_MS: then the event may be written. */
async function send(key, event) {
  const giveUpAt = Date.now() + GIVE_UP_MS;
  for (let pause = FIRST_PAUSE_MS; ; pause = Math.min(2 * pause, PAUSE_MAX_MS)) {
    let wait = pause * (0.5 + Math.random() / 2);
    try {
      const answer = await fetch(`${process.env.FENCEPOST_URL}/events`, {
        method: "POST",
        headers: { "Content-Type": "application/json", "Idempotency-Key": key },
        body: JSON.stringify(event),
        signal: AbortSignal.timeout(15_000),
      });
      const text = await answer.text();
      if (!RETRIED.has(answer.status)) return { status: answer.status, text };
      console.error(answer.status, text);
      wait += 1_000 * Number(answer.headers.get("Retry-After") ?? 0);
    } catch (error) {
      console.error("no answer:", error.cause ?? error);
    }
    if (Date.now() + wait > giveUpAt) throw new Error(`${key}: no final answer in ${GIVE_UP_MS} ms`);
    await new Promise((resume) => setTimeout(resume, wait));
  }
}

const [key, topic = "demo"] = process.argv.slice(2);
const { status, text } = await send(key, { topic, key, value: { order: key, total: 12.5 } });
console.log(status, text);
process.exitCode = status === 201 ? 0 : 1;
