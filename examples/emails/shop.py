"""What a web shop does: put jobs into the queue."""

from __future__ import annotations

from mail import EMAIL, Email

import ringlog

COUNT = 300


def main() -> None:
    """Put some emails, one of which cannot be delivered."""
    with ringlog.connect(wait=5) as client:
        client.topics.create(
            "emails", type="queue", durability="fsync", lease_ms=2_000, max_deliveries=20,
            dead_letter="emails.dead", exist_ok=True,
        )  # fmt: skip
        emails = client.queue("emails", payload=EMAIL)
        for number in range(1, COUNT + 1):
            to = "nobody" if number == 13 else f"customer-{number}@example.org"
            emails.put(Email(number=number, to=to, text="Your order is on its way."))
    print(f"{COUNT} emails are in the queue")


if __name__ == "__main__":
    main()
