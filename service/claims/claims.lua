-- Claims and answers in Redis. Kafka is the truth; all of this may vanish and is made again from the ledger.
--
-- The keyspace. KEYS[1] = P is the hash tag of the namespace, "{<ns>:0}"; every key begins with it.
--   P "g"         the generation and its store: "<offset> <run_id>/<master_replid>"
--   P "c"         how many calls have claimed something. It only grows, so a smaller one is that of an older copy
--   P "n"         nonce of the store recovery under way, expires
--   P "b"         evicted_keys of the server (INFO) when the last store recovery began
--   P "e"         the same of the store recovery that made the generation: another number now tells of keys that lack
--   P "f"         hash: slot -> freed. Claims of terms below it, and not marked delivered, were never written
--   P "a"         hash: slot -> applied. Every ledger record below this offset has been marked
--   P "l" slot    lease of a slot: the holder's token, expires. It saves work and proves nothing
--   P "o"         set: slots that were taken and not given back
--   P "m"         sorted set: members (tokens of live processes) by the time at which they are forgotten, ms
--   P "k" id      state of a key, expires at accepted_at + retention; id is 16 bytes:
--                   "C" slot:u16 term:u64 at:u64 fp:8s                             claimed
--                   "D" at:u64 fp:8s partition:u32 offset:u64 ts:u64 topic:rest    delivered
--                   "B" at:u64 fp:8s count:u32                    delivered, an atomic batch of so many members
-- Numbers are big-endian; offsets and ms stay below 2^53, so that Lua's doubles hold them.
--
-- ARGV[1] names the operation; it answers an array that begins with OK, STORE_LOST, REWOUND, EVICTED or FENCED. No
-- clock but Redis's.
-- The rules for keys are those of states.py, and one suite of vectors holds both to each other.

local P = KEYS[1]
local K = P .. 'k'
-- Processes may differ in their lease times, while one setting is being rolled out; not by more than this.
local LEASES_MOST = 10

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- The id of 40 characters behind a name in what INFO says. A pattern would take 10 µs more in every script.
local function id_in(info, name)
  local _, last = string.find(info, name, 1, true)
  return string.sub(info, last + 1, last + 40)
end

-- What INFO says under a name, up to the end of its line; '' where it has none.
local function word_in(section, name)
  local info = redis.call('INFO', section)
  local _, last = string.find(info, name, 1, true)
  return last and string.match(info, '^[^\r]*', last + 1) or ''
end

local function evicted()
  return tonumber(word_in('stats', 'evicted_keys:')) or 0
end

local function has_evicted()
  return evicted() ~= tonumber(redis.call('GET', P .. 'e') or 0)
end

-- The server that answers, in this one of its lives. A replica is no store: it answers as none.
local function store()
  local replication = redis.call('INFO', 'replication')
  if not string.find(replication, 'role:master', 1, true) then return 'not a primary' end
  return id_in(redis.call('INFO', 'server'), 'run_id:') .. '/' .. id_in(replication, 'master_replid:')
end

-- How many calls have claimed something, as `unsettled` found it.
local claims = 0

-- Why this is not the store of the caller's generation; nil where it is. ARGV[2] is P "g" as the caller knows it, and
-- ARGV[3] the most that it has heard of P "c": an older copy of the same store (SWAPDB, DEBUG RELOAD NOSAVE, a machine
-- that went back to a snapshot) has the same identity and generation.
local function unsettled()
  local present, here = redis.call('MGET', P .. 'g', P .. 'c'), store()
  if present[1] ~= ARGV[2] or string.sub(ARGV[2], -#here) ~= here then return {'STORE_LOST'} end
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

-- Valkey 9.1 and Redis 8.4 write many keys in one call, at two thirds of what a call a key costs.
local MANY = (redis.VALKEY_VERSION_NUM or 0) >= 0x090100 or (redis.REDIS_VERSION_NUM or 0) >= 0x080400
-- So many: a call from Lua takes some 8,000 values at most, and one key that is there makes it a call for nothing.
local AT_ONCE = 100

-- Write n keys that are not there; `rows` holds (key state)*. False where it could not be had: nothing is written then.
local function put_new(rows, n, expires)
  if n < 2 or not MANY then return false end
  local last = 2 * n
  rows[last + 1], rows[last + 2], rows[last + 3] = 'NX', 'PXAT', expires
  return redis.pcall('MSETEX', n, unpack(rows, 1, last + 3)) == 1
end

-- Delivered states are handed over from some place of ARGV on: (at format packed)*, each AT_ONCE keys or fewer with
-- their states, which have one `at`, so that they expire together. Answers for each the `at`, (key state)*, how many.
local function delivered(place)
  return function()
    local at, format, packed = ARGV[place], ARGV[place + 1], ARGV[place + 2]
    if not at then return nil end
    place = place + 3
    -- All in one call: two calls and three strings a key were a third of what a store recovery costs Redis.
    local rows = {struct.unpack(format, packed)}
    return tonumber(at), rows, (#rows - 1) / 2 -- behind the rows is the place where it ended
  end
end

local function replay_one(key, state, at, expires)
  if redis.call('SET', key, state, 'PXAT', expires, 'NX') then return end
  local present = redis.call('GET', key)
  -- Any claim ("C" is 67) gives way, also a newer one: a store that did not know of this record has let it be made.
  local gives_way = string.byte(present) == 67 or (struct.unpack('>I8', present, 2)) <= at
  if gives_way then put(key, state, expires) end
end

local function replay(place, retention)
  local now = now_ms()
  for at, rows, n in delivered(place) do
    local expires = at + retention
    if expires > now and not put_new(rows, n, expires) then
      for i = 1, 2 * n, 2 do replay_one(rows[i], rows[i + 1], at, expires) end
    end
  end
end

-- Operations for a generation: each begins with `unsettled`.
local operation = {}
-- Operations of who looks for a generation, or makes one.
local settling = {}

-- claim: generation claims slot term retention least_left (id:16s fp:8s)*. Answers P "c", and for each what it found:
-- "N" or "T" at where the claim stands (new, or taken over), "E" where Redis takes no more writes (maxmemory, too few
-- replicas), else the state that is there, behind "" (the same fingerprint), "X" (another) or whether the slot of a
-- claim is leased.
function operation.claim()
  local slot, term, retention, least_left = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  if hash_number('f', slot) ~= term then return {'FENCED'} end
  local asked, now, freed, answers, claimed_some = ARGV[8], now_ms(), {}, {'OK', claims}, false
  local head = 'C' .. struct.pack('>I2I8', tonumber(slot), term)
  local at_now = struct.pack('>I8', now)
  local head_now, answer_new = head .. at_now, 'N' .. at_now

  local function claim_one(key, claimed)
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

  local some, n, seen, place = {}, 0, {}, 1
  while place <= #asked do
    local id, fp = struct.unpack('>c16c8', asked, place)
    place = place + 24
    some[2 * n + 1], some[2 * n + 2] = K .. id, head_now .. fp
    n = n + 1
    -- Most are new, and written in one call; an id that is asked for twice is not new the second time.
    local twice = seen[id]
    seen[id] = true
    if n == AT_ONCE or twice or place > #asked then
      local new = not twice and put_new(some, n, now + retention)
      claimed_some = claimed_some or new
      for i = 1, 2 * n, 2 do answers[#answers + 1] = new and answer_new or claim_one(some[i], some[i + 1]) end
      n = 0
    end
  end
  if claimed_some then answers[2] = redis.call('INCR', P .. 'c') end
  return answers
end

-- claim_all: as claim, for an atomic batch: the whole first, then its members. Every claim is written, or none. Answers
-- as claim does, once, for the whole.
function operation.claim_all()
  local slot, term, retention, least_left = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
  if hash_number('f', slot) ~= term then return {'FENCED'} end
  local now, freed, oldest, taken = now_ms(), {}, nil, false
  for place = 1, #ARGV[8], 24 do
    local id, fp = string.sub(ARGV[8], place, place + 15), string.sub(ARGV[8], place + 16, place + 23)
    local state = redis.call('GET', K .. id)
    if state and string.byte(state) ~= 67 then
      -- A member that lives without its whole is another event to the batch, whatever its fingerprint.
      return {'OK', claims, ((place == 1 and string.sub(state, 10, 17) == fp) and '' or 'X') .. state}
    elseif state then
      local s, t, at = struct.unpack('>I2I8I8', state, 2)
      if not freed[s] then freed[s] = hash_number('f', s) end
      if freed[s] <= t then return {'OK', claims, redis.call('EXISTS', P .. 'l' .. s) .. state} end
      taken = taken or place == 1
      oldest = math.min(oldest or at, at)
    end
  end
  local at = oldest or now
  if at + retention - now < least_left then at = now end
  local head = 'C' .. struct.pack('>I2I8I8', tonumber(slot), term, at)
  for place = 1, #ARGV[8], 24 do
    local key = K .. string.sub(ARGV[8], place, place + 15)
    put(key, head .. string.sub(ARGV[8], place + 16, place + 23), at + retention)
  end
  return {'OK', redis.call('INCR', P .. 'c'), (taken and 'T' or 'N') .. struct.pack('>I8', at)}
end

-- mark: generation claims slot term retention previous this delivered. Answers how many states it did not touch.
function operation.mark()
  local retention = tonumber(ARGV[6])
  local head = 'C' .. struct.pack('>I2I8', tonumber(ARGV[4]), tonumber(ARGV[5]))
  local untouched = 0
  for at, rows, n in delivered(9) do
    for i = 1, 2 * n, 2 do
      local key, state = rows[i], rows[i + 1]
      -- Nearly always it is this claim: one call, which also leaves the time at which the key expires.
      local present = redis.call('SET', key, state, 'XX', 'KEEPTTL', 'GET')
      if not present then
        put(key, state, at + retention)
      elseif string.sub(present, 1, 11) ~= head then
        redis.call('SET', key, present, 'KEEPTTL')
        untouched = untouched + 1
      end
    end
  end
  -- Only from exactly the record before: a gap would hide a record whose mark failed from the next recovery.
  if hash_number('a', ARGV[4]) == tonumber(ARGV[7]) then redis.call('HSET', P .. 'a', ARGV[4], ARGV[8]) end
  return {'OK', untouched}
end

-- release: generation claims slot term id*
function operation.release()
  local head = 'C' .. struct.pack('>I2I8', tonumber(ARGV[4]), tonumber(ARGV[5]))
  for place = 1, #ARGV[6], 16 do
    local key = K .. string.sub(ARGV[6], place, place + 15)
    local present = redis.call('GET', key)
    if present and string.sub(present, 1, 11) == head then redis.call('DEL', key) end
  end
  return {'OK'}
end

-- find: generation claims id. Answers the state, its slot's freed and whether its slot is leased.
function operation.find()
  local state = redis.call('GET', K .. ARGV[4])
  if not state then return {'OK'} end
  if string.byte(state) ~= 67 then return {'OK', state} end
  local slot = struct.unpack('>I2', state, 2)
  return {'OK', state, hash_number('f', slot), redis.call('EXISTS', P .. 'l' .. slot)}
end

-- find_all: generation claims id*. Answers each state, '' where there is none.
function operation.find_all()
  local answers = {'OK'}
  for place = 1, #ARGV[4], 16 do
    answers[#answers + 1] = redis.call('GET', K .. string.sub(ARGV[4], place, place + 15)) or ''
  end
  return answers
end

-- replay: generation claims retention slot term delivered. The last one of a slot recovery names the slot and its term,
-- and answers FENCED where a later term has been freed; both are empty in the others.
function operation.replay()
  replay(7, tonumber(ARGV[4]))
  local slot, term = ARGV[5], ARGV[6]
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

-- take: generation claims slot token ttl. Answers 1 where the lease is the token's now.
function operation.take()
  local key = P .. 'l' .. ARGV[4]
  local holder = redis.call('GET', key)
  if holder and holder ~= ARGV[5] then return {'OK', 0} end
  redis.call('SET', key, ARGV[5], 'PX', ARGV[6])
  redis.call('SADD', P .. 'o', ARGV[4])
  return {'OK', 1}
end

-- give_back: generation claims slot token clean. One that is not clean is dead: somebody is to recover it.
function operation.give_back()
  local key = P .. 'l' .. ARGV[4]
  if redis.call('GET', key) == ARGV[5] then
    redis.call('DEL', key)
    if ARGV[6] == '1' then redis.call('SREM', P .. 'o', ARGV[4]) end
  end
  return {'OK'}
end

-- heartbeat: generation claims token ttl slots (held applied)* — one heartbeat of a process: its leases live on, the dead are
-- seen. `applied` is what the caller knows of it: a smaller one is that of an older copy. Keys that were evicted are seen
-- here, for it takes longer than all of a claim.
-- Answers P "c", the number of members, a character a slot ("m" mine, "t" taken by another, "f" free, "d" dead), and
-- `freed` of each slot held: past its holder's term it tells that another has had the slot meanwhile. There may be more
-- slots than the caller knows, while SLOTS_MAX is being raised: those up to the last one that was taken are told of too.
-- What would live for longer than leases do was made before the server's clock went back: it gets a lease's time from now.
function operation.heartbeat()
  for i = 7, #ARGV, 2 do
    if hash_number('a', ARGV[i]) < tonumber(ARGV[i + 1]) then return {'REWOUND'} end
  end
  if has_evicted() then return {'EVICTED'} end
  local token, ttl, now = ARGV[4], ARGV[5], now_ms()
  local most = LEASES_MOST * ttl
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
      -- One that ran out while nobody took it is taken again: `freed` tells whether it was recovered meanwhile.
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

-- who: answers the server's identity, the generation that it holds and its maxmemory-policy. The one operation that needs no generation.
function settling.who()
  local policy = word_in('memory', 'maxmemory_policy:')
  return {'OK', store(), redis.call('GET', P .. 'g') or '', policy == '' and 'noeviction' or policy}
end

-- Store recovery. Each of its scripts demands the store and, once it is written, the nonce: a flush ends the attempt.
-- recover: store nonce ttl seen. Answers 1 where no other recovery is under way, nor has ended since the caller saw the
-- generation (`seen`, as P "g" holds it): a second recovery would only fence everybody again.
function settling.recover()
  if store() ~= ARGV[2] then return {'STORE_LOST'} end
  if (redis.call('GET', P .. 'g') or '') ~= ARGV[5] then return {'OK', 0} end
  if not redis.call('SET', P .. 'n', ARGV[3], 'NX', 'PX', ARGV[4]) then return {'OK', 0} end
  redis.call('SET', P .. 'b', evicted())
  return {'OK', 1}
end

-- recover_read: store nonce ttl slots. Answers `applied` of each slot, -1 where there is none, or keys were evicted.
function settling.recover_read()
  if store() ~= ARGV[2] or redis.call('GET', P .. 'n') ~= ARGV[3] then return {'STORE_LOST'} end
  redis.call('PEXPIRE', P .. 'n', ARGV[4])
  local answers = {'OK'}
  local lacks = has_evicted()
  for slot = 0, ARGV[5] - 1 do answers[#answers + 1] = lacks and -1 or hash_number('a', slot) end
  return answers
end

-- recover_replay: store nonce ttl retention delivered
function settling.recover_replay()
  if store() ~= ARGV[2] or redis.call('GET', P .. 'n') ~= ARGV[3] then return {'STORE_LOST'} end
  redis.call('PEXPIRE', P .. 'n', ARGV[4])
  replay(6, tonumber(ARGV[5]))
  return {'OK'}
end

-- recover_end: store nonce generation (slot offset)*. All `freed`, then the generation; never an older one.
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

-- recover_abandon: store nonce — the attempt has failed, another need not wait for its nonce to expire.
function settling.recover_abandon()
  if store() == ARGV[2] and redis.call('GET', P .. 'n') == ARGV[3] then redis.call('DEL', P .. 'n') end
  return {'OK'}
end

if settling[ARGV[1]] then return settling[ARGV[1]]() end
return unsettled() or operation[ARGV[1]]()
