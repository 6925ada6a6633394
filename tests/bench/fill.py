"""Fills Redis with millions of keys: real entries in the format of claims.lua, written by a script in the server."""

from tests.bench.stage import Target

# Keys of one call: some 50 ms of Redis's time, well within a client's timeout.
_CHUNK = 20_000

# KEYS[1] the namespace's prefix, ARGV: first number, count, topic, retention in ms. Ids are 16 bytes that differ from
# one another; they need not be SHA-256, because Redis hashes them again.
_SCRIPT = """
local t = redis.call('TIME')
local now, first, topic = t[1] * 1000 + math.floor(t[2] / 1000), tonumber(ARGV[1]), ARGV[3]
for n = first, first + ARGV[2] - 1 do
  local id = struct.pack('>I8I8', (n * 2654435761) % 9007199254740991, n)
  local state = 'D' .. struct.pack('>I8I8I4I8I8', now, n, n % 3, n, now) .. topic
  redis.call('SET', KEYS[1] .. 'k' .. id, state, 'PXAT', string.format('%.0f', now + ARGV[4]))
end
return 1
"""


def fill(target: Target, start: int, end: int) -> None:
    """Write the delivered keys with the numbers from `start` to before `end` into the target's store."""
    with target.redis.client() as store:
        for first in range(start, end, _CHUNK):
            count = min(_CHUNK, end - first)
            store.eval(_SCRIPT, 1, f"{{{target.namespace}:0}}", str(first), str(count), target.topic, "86400000")
