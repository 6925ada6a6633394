-- Token buckets of callers, which all processes share. KEYS[1] = P is the prefix of every key, as in claims.lua.
--   P "r" id      "<tokens> <ms>": the tokens of a bucket at this time; expires when the bucket is full again
-- A bucket that is absent is full. Nothing here is a claim: it may vanish, and belongs to no generation.
--
-- ARGV is (id rate burst spent want)*, once for each bucket: tokens a second, the most that it holds, the tokens that
-- were spent without asking (less than 0: tokens that are given back), and those that are asked for. Returns for each
-- bucket the tokens that are granted, whole ones, and what is left, as text; less than 0 while a debt is paid off.

local P = KEYS[1]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i = 1, #ARGV, 5 do
  local key = P .. 'r' .. ARGV[i]
  local rate, burst = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
  local tokens = burst
  local held = redis.call('GET', key)
  if held then
    local left, at = string.match(held, '^(%S+) (%S+)$')
    tokens = math.min(burst, tonumber(left) + math.max(0, now - tonumber(at)) * rate / 1000)
  end
  tokens = math.min(burst, tokens - tonumber(ARGV[i + 3]))
  local granted = math.max(0, math.min(tonumber(ARGV[i + 4]), math.floor(tokens)))
  tokens = tokens - granted
  local full_ms = math.ceil((burst - tokens) / rate * 1000)
  redis.call('SET', key, string.format('%.17g %d', tokens, now), 'PX', math.min(full_ms + 1000, 2 ^ 40))
  answers[#answers + 1] = string.format('%d', granted)
  answers[#answers + 1] = string.format('%.6f', tokens)
end
return answers
