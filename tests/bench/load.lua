-- wrk's load for the benchmarks: `wrk -s load.lua URL -- name=value ...`, one thread. Ends with one line of JSON.
--   prefix  of the keys: "<prefix>-<n>"; each run has its own, so that every key is new
--   topic   the topic of the events; with topics=N <topic>-0 ... <topic>-(N-1) in turn
--   bytes   about this many in an event's JSON
--   batch   events in a request: 0 is POST /events, else POST /events/batch
--   keys    the number of keys after which they repeat from the first (0: never)
--   delay   ms of pause of a connection before each request, on average (uniform, from 0 to twice that)

local set = {prefix = 'k', topic = 'bench', topics = '1', bytes = '250', batch = '0', keys = '0', delay = '0'}
local n, count, topics, keys = 0, 0, 1, 0
local pad, head = '', {['content-type'] = 'application/json'}

local function event(number, key)
  local topic = topics > 1 and (set.topic .. '-' .. (number % topics)) or set.topic
  return '{"topic":"' .. topic .. '","key":"c' .. (number % 1000) .. '"' .. key ..
    ',"value":{"n":' .. number .. ',"pad":"' .. pad .. '"}}'
end

function init(args)
  for _, arg in ipairs(args) do
    local name, value = string.match(arg, '^(%w+)=(.*)$')
    set[name] = value
  end
  topics, keys, count = tonumber(set.topics), tonumber(set.keys), tonumber(set.batch)
  pad = string.rep('x', math.max(0, tonumber(set.bytes) - #event(100000, '')))
  local wait = tonumber(set.delay)
  if wait > 0 then delay = function() return math.random(0, 2 * wait) end end
end

local function next_number()
  n = n + 1
  return keys > 0 and (n - 1) % keys + 1 or n
end

function request()
  if count == 0 then
    local number = next_number()
    head['idempotency-key'] = set.prefix .. '-' .. number
    return wrk.format('POST', '/events', head, event(number, ''))
  end
  local events = {}
  for i = 1, count do
    local number = next_number()
    events[i] = event(number, ',"idempotency_key":"' .. set.prefix .. '-' .. number .. '"')
  end
  return wrk.format('POST', '/events/batch', head, '{"events":[' .. table.concat(events, ',') .. ']}')
end

function done(summary, latency)
  local e = summary.errors
  io.write(string.format(
    '{"requests":%d,"seconds":%f,"refused":%d,"broken":%d,"p50_ms":%f,"p99_ms":%f,"most_ms":%f}\n',
    summary.requests, summary.duration / 1e6, e.status, e.connect + e.read + e.write + e.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
end
