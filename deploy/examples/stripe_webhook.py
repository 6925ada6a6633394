"""Delivers an event as Stripe does, signed by Stripe's own library, until it is taken: a sender to try a source with.

    python -m deploy.examples.stripe_webhook http://127.0.0.1:8000/sources/stripe deploy/examples/stripe.secret

Like Stripe, it repeats the event under the same id, signs each attempt anew, and takes nothing but 2xx for an answer.
"""

import json
import sys
import time
from pathlib import Path

import httpx
import stripe

ATTEMPTS = 8
FIRST_PAUSE_S = 0.5  # doubled after each attempt


def event(id: str) -> str:
    """Make the body of an event, as far as the example needs it."""
    charge = {"id": "ch_1", "object": "charge", "amount": 1200, "currency": "eur", "customer": "cus_7"}
    return json.dumps({"id": id, "object": "event", "type": "charge.succeeded", "data": {"object": charge}})


def deliver(url: str, secret: str, body: str) -> httpx.Response:
    """Deliver a body until the answer is 2xx. Raises RuntimeError after ATTEMPTS attempts."""
    pause_s = FIRST_PAUSE_S
    with httpx.Client(timeout=30.0) as client:
        for _ in range(ATTEMPTS):
            signature = stripe.WebhookSignature.generate_signature_header(body, secret)
            headers = {"Content-Type": "application/json; charset=utf-8", "Stripe-Signature": signature}
            try:
                answer = client.post(url, content=body.encode(), headers=headers)
            except httpx.TransportError as error:  # the event may be written: the next attempt tells
                print(f"no answer: {error!r}")
            else:
                print(answer.status_code, answer.text)
                if answer.is_success:
                    return answer
            time.sleep(pause_s)
            pause_s *= 2
    raise RuntimeError(f"not taken in {ATTEMPTS} attempts")


if __name__ == "__main__":
    target, secret_file = sys.argv[1:]
    deliver(target, Path(secret_file).read_text(encoding="utf-8"), event(f"evt_{time.time_ns()}"))
