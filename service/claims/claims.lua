-- Claims and results in Redis. Kafka is the source of truth: all keys may vanish, and are replayed from the ledger.
--
-- The keys. KEYS[1] = P is the hash tag of the namespace, "{<ns>:0}", the prefix of every key.
--   P "g"         the generation and its store: "<offset> <run_id>/<master_replid>". This is layout 1 of these keys. A
--                 later layout has "v<layout> " before the offset: each script compares the whole key with the one
--                 that its process knows, so that a process never writes into a layout that it does not know
--   P "c"         number of calls that claimed something. It only grows: a smaller one is that of an older copy
--   P "n"         nonce of the store recovery in progress, expires
--   P "b"         evicted_keys of the server (INFO) when the last store recovery began
--   P "e"         the same for the recovery that made the generation: if the number differs now, keys are missing
--   P "f"         hash: slot -> freed. A claim of an earlier term that is not marked delivered was never written
--   P "a"         hash: slot -> applied. Every ledger record below this offset has been marked
--   P "l" slot    lease of a slot: the holder's token, expires. It avoids conflicts, and no rule relies on it
--   P "o"         set: slots that were taken and not given back
--   P "m"         sorted set: members (tokens of live processes) by the time at which they expire, ms
--   P "k" id      state of a key, expires at accepted_at + the key's retention; id is 16 bytes:
--                   "C" slot:u16 term:u64 at:u64 fp:8s                             claimed
--                   "D" at:u64 fp:8s partition:u32 offset:u64 ts:u64 topic:rest    delivered
--                   "B" at:u64 fp:8s count:u32                    delivered, an atomic batch of `count` members
--                   "d", "b"      the same, with ttl_s:u32 before topic, at the end: a retention by rule, seconds
--                   "q" as "d", with 0x00 and why it was refused behind topic: a dead letter in a quarantine topic
-- (P "r" id is a bucket of a caller's rate, of rates.lua. No operation here reads it.)
-- Numbers are big-endian; offsets and ms stay below 2^53, so that Lua's doubles hold them.
--
-- ARGV[1] names the operation. It returns an array that begins with OK, STORE_LOST, REWOUND, EVICTED or FENCED. The
-- only clock is Redis's. The rules for keys are those of states.py; one suite of test vectors runs against both.

local P = KEYS[1]
local K = P .. 'k'
-- The most by which the lease times of processes may differ, while a setting is being rolled out.
local LEASE_RATIO_MAX = 10

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- The id of 40 characters after a name in a reply of INFO. A pattern would be slower, in every script.
local function id_in(info, name)
  local _, last = string.find(info, name, 1, true)
  return string.sub(info, last + 1, last + 40)
end

-- The value of a field of INFO; '' if there is none.
local function info_field(section, name)
  local info = redis.call('INFO', section)
  local _, last = string.find(info, name, 1, true)
  return last and string.match(info, '^[^\r]*', last + 1) or ''
end

local function evicted()
  return tonumber(info_field('stats', 'evicted_keys:')) or 0
end

local function has_evicted()
  return evicted() ~= tonumber(redis.call('GET', P .. 'e') or 0)
end

-- The identity of this server since its start, "<run_id>/<master_replid>"; 'not a primary' for a replica.
local function store()
  local replication = redis.call('INFO', 'replication')
  if not string.find(replication, 'role:master', 1, true) then return 'not a primary' end
  return id_in(redis.call('INFO', 'server'), 'run_id:') .. '/' .. id_in(replication, 'master_replid:')
end

-- P "c", read by `unsettled`.
local claims = 0

-- The reply if this is not the store of the caller's generation, else nil. ARGV[2] is P "g" as the caller knows it, and
-- ARGV[3] the highest P "c" that it has seen: an older copy of the store (SWAPDB, DEBUG RELOAD NOSAVE, a machine
-- restored from a snapshot) has the same identity and generation.
local function unsettled()
  local present, this_store = redis.call('MGET', P .. 'g', P .. 'c'), store()
  if present[1] ~= ARGV[2] or string.sub(ARGV[2], -#this_store) ~= this_store then return {'STORE_LOST'} end
  claims = tonumber(present[2] or 0)
  if claims < tonumber(ARGV[3]) then return {'REWOUND'} end
end

local function hash_number(hash, slot)
  return tonumber(redis.call('HGET', P .. hash, slot) or -1)
end

local function raise(hash, slot, value)
  if tonumber(value) > hash_number(hash, slot) then redis.call('HSET', P .. hash, slot, value) end
end

local function put(key, state, expires)
  redis.call('SET', key, state, 'PXAT', expires)
end

-- Valkey 9.1 and Redis 8.4 write many keys in one call (MSETEX), which is cheaper than one SET for each key.
local HAS_MSETEX = (redis.VALKEY_VERSION_NUM or 0) >= 0x090100 or (redis.REDIS_VERSION_NUM or 0) >= 0x080400
-- Keys in one MSETEX: a call from Lua takes some 8,000 values, and one existing key makes the whole call fail.
local AT_ONCE = 100

-- Write n new keys; `rows` holds (key state)*. False if nothing was written: a key exists, or MSETEX does not.
local function put_new(rows, n, expires)
  if n < 2 or not HAS_MSETEX then return false end
  local last = 2 * n
  rows[last + 1], rows[last + 2], rows[last + 3] = 'NX', 'PXAT', expires
  return redis.pcall('MSETEX', n, unpack(rows, 1, last + 3)) == 1
end

-- Iterate over the delivered states in ARGV from an index on: (expires format packed)*, each at most AT_ONCE keys and
-- states that expire together. Returns for each `expires`, (key state)*, and the number of keys.
local function delivered(index)
  return function()
    local expires, format, packed = ARGV[index], ARGV[index + 1], ARGV[index + 2]
    if not expires then return nil end
    index = index + 3
    -- One call for all keys: a store recovery unpacks millions of them.
    local rows = {struct.unpack(format, packed)}
    return tonumber(expires), rows, (#rows - 1) / 2 -- the last value is the offset at which unpack ended
  end
end

local function replay_one(key, state, expires)
  if redis.call('SET', key, state, 'PXAT', expires, 'NX') then return end
  local present = redis.call('GET', key)
  -- Any claim ("C" is 67) is replaced, also a newer one: it was made in a store without this record. A delivered state
  -- has its `at` behind its first byte.
  local is_replaced = string.byte(present) == 67
    or (struct.unpack('>I8', present, 2)) <= (struct.unpack('>I8', state, 2))
  if is_replaced then put(key, state, expires) end
end

local function replay(index)
  local now = now_ms()
  for expires, rows, n in delivered(index) do
    if expires > now and not put_new(rows, n, expires) then
      for i = 1, 2 * n, 2 do replay_one(rows[i], rows[i + 1], expires) end
    end
  end
end

-- Operations in a generation: each begins with `unsettled`.
local operation = {}
-- Operations that find a generation, or make one.
local settling = {}

-- claim: generation claims slot term least_left (retention pairs)*, where `pairs` is (id:16s fp:8s)* of keys with this
-- retention. Returns P "c", and for each claim:
-- "N" at or "T" at if the claim stands (new, or taken over), "E" if Redis takes no more writes (maxmemory, too few
-- replicas), else the state that was found, after "" (the same fingerprint), "X" (another one), or for a claim "1" or
-- "0": whether its slot is leased.
function operation.claim()
  local slot, term, least_left = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
  if hash_number('f', slot) ~= term then return {'FENCED'} end
  local now, freed, seen, answers, claimed_some = now_ms(), {}, {}, {'OK', claims}, false
  local head = 'C' .. struct.pack('>I2I8', tonumber(slot), term)
  local at_now = struct.pack('>I8', now)
  local head_now, answer_new = head .. at_now, 'N' .. at_now

  local function claim_one(key, claimed, retention)
    local set = redis.pcall('SET', key, claimed, 'PXAT', now + retention, 'NX')
    if set and not set.err then
      claimed_some = true
      return answer_new
    end
    local state, fp = redis.call('GET', key), string.sub(claimed, -8)
    if not state then return 'E' end
    if string.byte(state) ~= 67 then return (string.sub(state, 10, 17) == fp and '' or 'X') .. state end
    local s, t, at = struct.unpack('>I2I8I8', state, 2)
    if not freed[s] then freed[s] = hash_number('f', s) end
    if freed[s] <= t then return redis.call('EXISTS', P .. 'l' .. s) .. state end
    if at + retention - now < least_left then at = now end
    local at_kept = struct.pack('>I8', at)
    local taken = redis.pcall('SET', key, head .. at_kept .. fp, 'PXAT', at + retention)
    if taken.err then return 'E' end
    claimed_some = true
    return 'T' .. at_kept
  end

  local function claim_pairs(pairs_asked, retention)
    local rows, n, start = {}, 0, 1
    while start <= #pairs_asked do
      local id, fp = struct.unpack('>c16c8', pairs_asked, start)
      start = start + 24
      rows[2 * n + 1], rows[2 * n + 2] = K .. id, head_now .. fp
      n = n + 1
      -- Most ids are new, and written in one call. An id that occurs again is not new.
      local repeated = seen[id]
      seen[id] = true
      if n == AT_ONCE or repeated or start > #pairs_asked then
        local new = not repeated and put_new(rows, n, now + retention)
        claimed_some = claimed_some or new
        for i = 1, 2 * n, 2 do
          answers[#answers + 1] = new and answer_new or claim_one(rows[i], rows[i + 1], retention)
        end
        n = 0
      end
    end
  end

  for i = 7, #ARGV, 2 do claim_pairs(ARGV[i + 1], tonumber(ARGV[i])) end
  if claimed_some then answers[2] = redis.call('INCR', P .. 'c') end
  return answers
end

-- claim_all: as claim with one retention, for an atomic batch: the whole first, then its members. All claims are
-- written, or none. Returns what claim returns, once, for the whole.
function operation.claim_all()
  local slot, term, least_left, retention = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  if hash_number('f', slot) ~= term then return {'FENCED'} end
  local now, freed, oldest, taken = now_ms(), {}, nil, false
  for start = 1, #ARGV[8], 24 do
    local id, fp = string.sub(ARGV[8], start, start + 15), string.sub(ARGV[8], start + 16, start + 23)
    local state = redis.call('GET', K .. id)
    if state and string.byte(state) ~= 67 then
      -- A member whose whole is gone is a conflict, whatever its fingerprint.
      return {'OK', claims, ((start == 1 and string.sub(state, 10, 17) == fp) and '' or 'X') .. state}
    elseif state then
      local s, t, at = struct.unpack('>I2I8I8', state, 2)
      if not freed[s] then freed[s] = hash_number('f', s) end
      if freed[s] <= t then return {'OK', claims, redis.call('EXISTS', P .. 'l' .. s) .. state} end
      taken = taken or start == 1
      oldest = math.min(oldest or at, at)
    end
  end
  local at = oldest or now
  if at + retention - now < least_left then at = now end
  local head = 'C' .. struct.pack('>I2I8I8', tonumber(slot), term, at)
  for start = 1, #ARGV[8], 24 do
    local key = K .. string.sub(ARGV[8], start, start + 15)
    local set = redis.pcall('SET', key, head .. string.sub(ARGV[8], start + 16, start + 23), 'PXAT', at + retention)
    -- Redis refuses only the first write of a script, so nothing of the batch is written.
    if set.err then return {'OK', claims, 'E'} end
  end
  return {'OK', redis.call('INCR', P .. 'c'), (taken and 'T' or 'N') .. struct.pack('>I8', at)}
end

-- mark: generation claims slot term previous this delivered. Returns how many states were left as they are.
function operation.mark()
  local head = 'C' .. struct.pack('>I2I8', tonumber(ARGV[4]), tonumber(ARGV[5]))
  local untouched = 0
  for expires, rows, n in delivered(8) do
    for i = 1, 2 * n, 2 do
      local key, state = rows[i], rows[i + 1]
      -- Nearly always the key holds this claim: one call, which keeps the key's expiry.
      local present = redis.call('SET', key, state, 'XX', 'KEEPTTL', 'GET')
      if not present then
        put(key, state, expires)
      elseif string.sub(present, 1, 11) ~= head then
        redis.call('SET', key, present, 'KEEPTTL')
        untouched = untouched + 1
      end
    end
  end
  -- Only if the previous record is marked: a gap would hide a record whose mark failed from the next recovery.
  if hash_number('a', ARGV[4]) == tonumber(ARGV[6]) then redis.call('HSET', P .. 'a', ARGV[4], ARGV[7]) end
  return {'OK', untouched}
end

-- release: generation claims slot term id*
function operation.release()
  local head = 'C' .. struct.pack('>I2I8', tonumber(ARGV[4]), tonumber(ARGV[5]))
  for start = 1, #ARGV[6], 16 do
    local key = K .. string.sub(ARGV[6], start, start + 15)
    local present = redis.call('GET', key)
    if present and string.sub(present, 1, 11) == head then redis.call('DEL', key) end
  end
  return {'OK'}
end

-- find: generation claims id. Returns the state, and for a claim its slot's freed and whether its slot is leased.
function operation.find()
  local state = redis.call('GET', K .. ARGV[4])
  if not state then return {'OK'} end
  if string.byte(state) ~= 67 then return {'OK', state} end
  local slot = struct.unpack('>I2', state, 2)
  return {'OK', state, hash_number('f', slot), redis.call('EXISTS', P .. 'l' .. slot)}
end

-- find_all: generation claims id*. Returns each state, '' if there is none.
function operation.find_all()
  local answers = {'OK'}
  for start = 1, #ARGV[4], 16 do
    answers[#answers + 1] = redis.call('GET', K .. string.sub(ARGV[4], start, start + 15)) or ''
  end
  return answers
end

-- replay: generation claims slot term delivered. The last call of a slot recovery names the slot and its
-- term, and returns FENCED if a later term has been freed; both are empty in the other calls.
function operation.replay()
  replay(6)
  local slot, term = ARGV[4], ARGV[5]
  if slot ~= '' then
    raise('f', slot, term)
    raise('a', slot, term)
    if hash_number('f', slot) ~= tonumber(term) then return {'FENCED'} end
  end
  return {'OK'}
end

-- applied: generation claims slot
function operation.applied()
  return {'OK', hash_number('a', ARGV[4])}
end

-- take: generation claims slot token ttl. Returns 1 if the lease is the token's now.
function operation.take()
  local key = P .. 'l' .. ARGV[4]
  local holder = redis.call('GET', key)
  if holder and holder ~= ARGV[5] then return {'OK', 0} end
  redis.call('SET', key, ARGV[5], 'PX', ARGV[6])
  redis.call('SADD', P .. 'o', ARGV[4])
  return {'OK', 1}
end

-- give_back: generation claims slot token clean. A slot that is not given back clean is dead: it must be recovered.
function operation.give_back()
  local key = P .. 'l' .. ARGV[4]
  if redis.call('GET', key) == ARGV[5] then
    redis.call('DEL', key)
    if ARGV[6] == '1' then redis.call('SREM', P .. 'o', ARGV[4]) end
  end
  return {'OK'}
end

-- heartbeat: generation claims token ttl slots (held applied)*. Renews the leases of a process, and finds dead slots.
-- `applied` is what the caller knows: a smaller one here is that of an older copy. Evictions are checked here only,
-- because that takes longer than a whole claim.
-- Returns P "c", the number of members, a character for each slot ("m" mine, "t" taken by another, "f" free, "d" dead),
-- and `freed` of each slot held: if it is past the holder's term, another process has had the slot meanwhile. While
-- SLOTS_MAX is being raised, there may be more slots than the caller knows: all up to the last one taken are returned.
-- Leases and members that would live for too long were written before the server's clock went back: they are shortened.
function operation.heartbeat()
  for i = 7, #ARGV, 2 do
    if hash_number('a', ARGV[i]) < tonumber(ARGV[i + 1]) then return {'REWOUND'} end
  end
  if has_evicted() then return {'EVICTED'} end
  local token, ttl, now = ARGV[4], ARGV[5], now_ms()
  local most = LEASE_RATIO_MAX * ttl
  redis.call('ZREMRANGEBYSCORE', P .. 'm', string.format('(%.0f', now + most), '+inf')
  redis.call('ZADD', P .. 'm', string.format('%.0f', now + ttl), token)
  redis.call('ZREMRANGEBYSCORE', P .. 'm', '-inf', string.format('%.0f', now))
  local held, map, freed, last = {}, {}, {}, ARGV[6] - 1
  for i = 7, #ARGV, 2 do
    held[ARGV[i]] = true
    freed[#freed + 1] = hash_number('f', ARGV[i])
    last = math.max(last, tonumber(ARGV[i]))
  end
  for _, slot in ipairs(redis.call('SMEMBERS', P .. 'o')) do last = math.max(last, tonumber(slot)) end
  for slot = 0, last do
    local key = P .. 'l' .. slot
    local holder = redis.call('GET', key)
    if held[tostring(slot)] and (not holder or holder == token) then
      -- An expired lease that nobody took is renewed: `freed` shows whether the slot was recovered meanwhile.
      redis.call('SET', key, token, 'PX', ttl)
      redis.call('SADD', P .. 'o', slot)
      map[#map + 1] = 'm'
    elseif holder then
      if redis.call('PTTL', key) > most then redis.call('PEXPIRE', key, ttl) end
      map[#map + 1] = 't'
    else
      map[#map + 1] = redis.call('SISMEMBER', P .. 'o', slot) == 1 and 'd' or 'f'
    end
  end
  return {'OK', claims, redis.call('ZCARD', P .. 'm'), table.concat(map), freed}
end

-- leave: generation claims token
function operation.leave()
  redis.call('ZREM', P .. 'm', ARGV[4])
  return {'OK'}
end

-- who: returns the server's identity, the generation that it holds, and its maxmemory-policy.
function settling.who()
  local policy = info_field('memory', 'maxmemory_policy:')
  return {'OK', store(), redis.call('GET', P .. 'g') or '', policy == '' and 'noeviction' or policy}
end

-- Store recovery. Each of its scripts requires the store and, once it is written, the nonce: a flush ends the attempt.
-- recover: store nonce ttl seen. Returns 1 if no other recovery is in progress, or has ended since the caller saw the
-- generation (`seen`, as P "g" holds it): a second recovery would only fence all slots again.
function settling.recover()
  if store() ~= ARGV[2] then return {'STORE_LOST'} end
  if (redis.call('GET', P .. 'g') or '') ~= ARGV[5] then return {'OK', 0} end
  if not redis.call('SET', P .. 'n', ARGV[3], 'NX', 'PX', ARGV[4]) then return {'OK', 0} end
  redis.call('SET', P .. 'b', evicted())
  return {'OK', 1}
end

-- Whether the keys came one by one from another node of a cluster, because their hash slot was moved: nothing proves
-- that all came. A replica that was promoted got them in their order, and has the old master_replid as its second one.
local function was_moved()
  if info_field('cluster', 'cluster_enabled:') ~= '1' then return false end
  local held = redis.call('GET', P .. 'g')
  if not held then return true end
  local replication, last = redis.call('INFO', 'replication'), string.sub(held, -40)
  return id_in(replication, 'master_replid:') ~= last and id_in(replication, 'master_replid2:') ~= last
end

-- recover_read: store nonce ttl slots. Returns `applied` of each slot, -1 if there is none, keys were evicted, or the
-- hash slot was moved.
function settling.recover_read()
  if store() ~= ARGV[2] or redis.call('GET', P .. 'n') ~= ARGV[3] then return {'STORE_LOST'} end
  redis.call('PEXPIRE', P .. 'n', ARGV[4])
  local answers = {'OK'}
  local is_incomplete = has_evicted() or was_moved()
  for slot = 0, ARGV[5] - 1 do answers[#answers + 1] = is_incomplete and -1 or hash_number('a', slot) end
  return answers
end

-- recover_replay: store nonce ttl delivered
function settling.recover_replay()
  if store() ~= ARGV[2] or redis.call('GET', P .. 'n') ~= ARGV[3] then return {'STORE_LOST'} end
  redis.call('PEXPIRE', P .. 'n', ARGV[4])
  replay(5)
  return {'OK'}
end

-- recover_end: store nonce generation (slot offset)*. Raises `freed` of all slots, then sets a newer generation.
function settling.recover_end()
  if store() ~= ARGV[2] or redis.call('GET', P .. 'n') ~= ARGV[3] then return {'STORE_LOST'} end
  local present = redis.call('GET', P .. 'g')
  if present and tonumber(string.match(present, '^%d+')) >= tonumber(ARGV[4]) then return {'STORE_LOST'} end
  for i = 5, #ARGV, 2 do
    raise('f', ARGV[i], ARGV[i + 1])
    raise('a', ARGV[i], ARGV[i + 1])
  end
  redis.call('SET', P .. 'g', ARGV[4] .. ' ' .. ARGV[2])
  redis.call('SET', P .. 'e', redis.call('GET', P .. 'b') or 0)
  redis.call('DEL', P .. 'n')
  return {'OK'}
end

-- recover_abandon: store nonce. Deletes the nonce of a failed attempt, so that the next one need not wait for it.
function settling.recover_abandon()
  if store() == ARGV[2] and redis.call('GET', P .. 'n') == ARGV[3] then redis.call('DEL', P .. 'n') end
  return {'OK'}
end

if settling[ARGV[1]] then return settling[ARGV[1]]() end
return unsettled() or operation[ARGV[1]]()
