#!lua name=kmqpy_library
--[[
The calls of kmqpy.storages.engine, each one function and so one atomic step. engine.py loads this library under
a name that holds a digest of this text, in place of `kmqpy_library`: clients of different versions of kmqpy
find their own.

A queue is KEYS[1], a hash of its settings and counters, with these beside it in the same hash slot:

  :rows      hash    id -> row: every message that is not dead
  :states    hash    id -> state: of rows that were taken, given back, delayed or have a priority; others are fresh
  :fresh     list    ids of fresh rows, in the order they were put; not of those that have a digest
  :ordered   zset    ids of all other ready rows, by score()
  :delayed   zset    ids of delayed rows, by when they are due
  :taken     zset    ids of taken rows, by id
  :leases    zset    the same, by when the lease ends; empty in a queue with manual redelivery
  :digests   hash    id -> digest: rows of a queue that collapses which nobody has taken
  :twins     zset    the same, as members digest .. id
  :dead      zset    ids of dead rows, in the order they were buried
  :dead_rows, :dead_cards   hashes   id -> row, and id -> what is listed of it without its body
  :groups    hash    id -> group: rows, dead ones too, of a queue with order "group", or with shares (rule 13)
  :behind    zset    members of member_of(): rows that wait for another one of their group
  :heads     hash    group -> id of the row that is ready or, with order "group", delayed
  :busy, :held   hashes   group -> how many of it are taken; where dead rows hold it, how many are dead
  :dedup     hash    dedup key -> id of the row that has it, and until when
  :dedup_until   zset    the keys, by when to look at them again

An id is in exactly one of fresh, ordered, delayed, taken, behind and dead; so their lengths are the queue's exact sizes.
A row is first_enqueued_ms (8 bytes), then what rows.py made: length of the key + 1, length of the headers
(4 bytes each), key, headers, body. It is written once. A state changes with each step of the message's life.

Ids and places are numbers of one series, which grows: an id is the place of a fresh row, so rows of both kinds
of order can be compared. The client gives a queue blocks of numbers that no other queue of the storage has.

What a caller has to do something about is an error whose text starts with KMQ.
]]

local STEP = 1000 -- rows that one call moves at most beyond those it is asked for
local PIECE = 4000 -- values that Lua can hand over to one command
local BYTES = 2 ^ 24 -- about as many bytes of rows are in one reply, and one row more
local MANY = 32 -- pairs, from which on write_many() is faster than write()
local LONG_BYTES = 100 -- more than hash-max-listpack-value and zset-max-listpack-value, which are 64
local SHOWN_BYTES = 100 -- about as much is in a reply beside each row
local PRIORITIES = 2 ^ 49 -- distance of two priorities in score(); all numbers are smaller
local TOO_LARGE = 'WRONGTYPE a number that kmqpy has not counted to' -- beyond 2 ^ 53 two ids would be the same
local UNSETTLED_S = 3600 -- a queue whose creator died before it was registered is removed after that
local STATE = '>c1BI4I4I8I8I8I8B' -- status, priority, take, requeues, times, place, has a reason; then the reason
local ANY = -1 -- as the number of a take: ANY_TAKE of engine.py
local STATE_BYTES = 43 -- of a state without a reason
local ENDS_AT = 27 -- in a state
local ROW_BYTES = 16 -- of a row without key, headers and body
local CARD_BYTES = 12 -- of a card before its state
local DIGEST_BYTES = 16
local PARTS = {
  ':rows', ':states', ':fresh', ':ordered', ':delayed', ':taken', ':leases', ':digests', ':twins', ':behind',
  ':heads', ':busy',
}
local DEAD_PARTS = { ':dead', ':dead_rows', ':dead_cards', ':held' }
local OTHER_PARTS = { ':groups', ':dedup', ':dedup_until' }
local KEY_BYTES = 22 -- of a dedup key
local LEAST_WINDOW_MS = 60000 -- before a key is looked at again, if it lasts until its message is acknowledged
local MAX_RANK = 10000
local NOISY_FROM, NOISY_PART = 30, 10 -- see noise() of kmqpy.storages.settings
local GROUP = 'kmq-group' -- the first header of a row of a group
local LIBRARY = 'kmqpy_library_'

local function text_of(number)
  return string.format('%.0f', number)
end

-- Calls a command with many values, in pieces that Lua can hand over; returns the last reply.
local function write(command, key, values)
  local reply
  for first = 1, #values, PIECE do
    reply = redis.call(command, key, unpack(values, first, math.min(first + PIECE - 1, #values)))
  end
  return reply
end

-- The same for many pairs. Redis keeps a small hash or sorted set as one list, and searches that for each value;
-- a value that is too long for such lists makes it something better, and is removed again.
local function write_many(command, remove, key, values)
  if #values < 2 * MANY then return write(command, key, values) end
  local long = string.rep('-', LONG_BYTES)
  redis.call(command, key, '0', long) -- no row has the id 0
  write(command, key, values)
  redis.call(remove, key, command == 'ZADD' and long or '0')
end

local function read(key, ids)
  if #ids <= PIECE then
    return #ids == 0 and {} or redis.call('HMGET', key, unpack(ids))
  end
  local found = {}
  for first = 1, #ids, PIECE do
    for _, value in ipairs(redis.call('HMGET', key, unpack(ids, first, math.min(first + PIECE - 1, #ids)))) do
      found[#found + 1] = value
    end
  end
  return found
end

-- Values of at least so many bytes; false for others, which are not there or not of kmqpy. An error in the middle
-- of a call would leave it half done, and cost the messages beside a damaged one.
local function read_whole(key, ids, bytes)
  local found = read(key, ids)
  for i, value in ipairs(found) do
    if value and #value < bytes then found[i] = false end
  end
  return found
end

local IS_STATUS = { T = true, R = true, D = true, W = true }

local function read_states(q, ids)
  local found = read_whole(q.states, ids, STATE_BYTES)
  for i, state in ipairs(found) do
    if state and not IS_STATUS[string.sub(state, 1, 1)] then found[i] = false end
  end
  return found
end

local function read_rows(q, ids)
  local found = read_whole(q.rows, ids, ROW_BYTES)
  for i, id in ipairs(ids) do
    if found[i] and not tonumber(id) then found[i] = false end
  end
  return found
end

-- States -----------------------------------------------------------------------------------------

local function packed(s)
  return struct.pack(STATE, s.status, s.priority, s.take, s.requeues, s.enqueued, s.since, s.ends, s.place,
    s.reason and 1 or 0) .. (s.reason or '')
end

local function unpacked(text)
  local s, has_reason, rest = {}, nil, nil
  s.status, s.priority, s.take, s.requeues, s.enqueued, s.since, s.ends, s.place, has_reason, rest =
    struct.unpack(STATE, text)
  s.reason = has_reason == 1 and string.sub(text, rest) or nil
  return s
end

local function fresh_state(id, row)
  return {
    status = 'R', priority = 0, take = 0, requeues = 0, enqueued = struct.unpack('>I8', row),
    since = 0, ends = 0, place = tonumber(id) or 0,
  }
end

-- Where a row is among the ready: by priority, the highest first, or by rank, the smallest first, then by place (beyond
-- rank 6 numbers are too large for exact places).
local function score(s, rank)
  return text_of((9 - s.priority + (rank or 0)) * PRIORITIES + s.place)
end

-- A queue within one call ------------------------------------------------------------------------

local function next_number(q)
  q.number = q.number + 1
  return q.number
end

local function nothing_ready(q)
  return redis.call('LLEN', q.fresh) == 0 and redis.call('ZCARD', q.ordered) == 0
end

-- Those who wait have seen that nothing was ready, so they need to hear of the first row only.
local function announce_arrival(q)
  q.arrivals = redis.call('HINCRBY', q.key, 'arrivals', 1)
  redis.call('PUBLISH', q.key, 'a ' .. q.arrivals)
end

-- A row becomes ready by itself sooner than those who wait were told.
local function announce_due(q, due)
  if not q.first_due or due < q.first_due then
    q.first_due = due
    redis.call('PUBLISH', q.key, 'd ' .. text_of(due - q.now))
  end
end

local function changes()
  return { states = {}, ready = {}, delayed = {}, behind = {}, leases = {}, buried = {} }
end

local function bury_row(out, id, s, at)
  s.status, s.since, s.ends, s.id = 'X', at, 0, id
  out.buried[#out.buried + 1] = s
end

-- Groups: rule 11 of Engine ------------------------------------------------------------------------

-- Sorts by group, then by place: a group holds no NUL.
local function member_of(group, s, id)
  return group .. '\0' .. string.format('%016.0f', s.place) .. id
end

local function groups_of(q, ids)
  return q.in_groups and read(q.groups, ids) or {}
end

local function count_down(key, group)
  if redis.call('HINCRBY', key, group, -1) <= 0 then redis.call('HDEL', key, group) end
end

-- Of each of these groups (false: none) one row more is taken, or by -1 one less.
local function count_busy(q, groups, by)
  local added, names, counts, free = {}, {}, {}, {}
  for _, group in ipairs(groups) do
    if group then
      if not added[group] then names[#names + 1] = group end
      added[group] = (added[group] or 0) + by
    end
  end
  for i, found in ipairs(read(q.busy, names)) do
    local count = (tonumber(found) or 0) + added[names[i]]
    if count > 0 then
      counts[#counts + 1] = names[i]
      counts[#counts + 1] = text_of(count)
    else
      free[#free + 1] = names[i]
    end
  end
  write('HSET', q.busy, counts)
  write('HDEL', q.busy, free)
end

-- Rows leave the state that they are in; settle() looks after their groups.
local function leave_groups(q, ids, states)
  if not q.in_groups then return end
  local taken, waiting, ready, ready_ids, no_heads = {}, {}, {}, {}, {}
  for i, group in ipairs(groups_of(q, ids)) do
    if group then
      local status = string.sub(states[i], 1, 1)
      if status == 'T' then taken[#taken + 1] = group
      elseif status == 'W' then waiting[#waiting + 1] = member_of(group, unpacked(states[i]), ids[i])
      else ready[#ready + 1], ready_ids[#ready + 1] = group, ids[i]
      end
      q.touched[group] = true
    end
  end
  for i, head in ipairs(read(q.heads, ready)) do
    if head == ready_ids[i] then no_heads[#no_heads + 1] = ready[i] end
  end
  count_busy(q, taken, -1)
  write('ZREM', q.behind, waiting)
  write('HDEL', q.heads, no_heads)
end

-- Members of those that wait in a group, in order.
local function behind(q, group, count)
  return redis.call('ZRANGEBYLEX', q.behind, '[' .. group .. '\0', '(' .. group .. '\1', 'LIMIT', 0, count)
end

local function id_in(member, group)
  return string.sub(member, #group + 18)
end

-- A row waits, be it for others or for a time to come (its `ends`), until settle() lets it come.
local function wait_behind(q, out, id, s, group)
  s.status = 'W'
  table.insert(out.behind, '0')
  table.insert(out.behind, member_of(group, s, id))
  table.insert(out.states, id)
  table.insert(out.states, packed(s))
  q.touched[group] = true
end

-- The delay of the queue's retries, shortened by up to `jitter` thousandths of it.
local function retry_delay(q, id, requeues)
  if not q.retries then return 0 end
  local delay = q.retries[math.min(requeues + 1, #q.retries)]
  local by = (tonumber(id) * 7919 + q.now) % 1001
  return delay - math.floor(delay * q.jitter * by / 1000000)
end

-- Rule 4 of Engine. Without a delay it is that of the queue's retries.
local function requeue(q, out, id, s, at, delay, count, reason)
  s.reason = reason
  if count and q.max_redeliveries and s.requeues >= q.max_redeliveries then
    bury_row(out, id, s, at)
    return
  end
  delay = delay or (count and retry_delay(q, id, s.requeues)) or 0
  if count then
    s.requeues = s.requeues + 1
    s.enqueued = at
  end
  if not q.to_front then
    s.place = next_number(q)
  end
  s.since = 0
  local group = groups_of(q, { id })[1]
  if group and not (q.shares and at + delay > q.now) then
    s.ends = at + delay
    wait_behind(q, out, id, s, group)
    return
  end
  if at + delay > q.now then
    s.status, s.ends = 'D', at + delay
    table.insert(out.delayed, text_of(s.ends))
    table.insert(out.delayed, id)
  else
    s.status, s.ends = 'R', 0
    table.insert(out.ready, score(s))
    table.insert(out.ready, id)
  end
  table.insert(out.states, id)
  table.insert(out.states, packed(s))
end

local function apply(q, out)
  write('HSET', q.states, out.states)
  write('ZADD', q.behind, out.behind)
  if #out.ready > 0 then
    local is_first = nothing_ready(q)
    write('ZADD', q.ordered, out.ready)
    if is_first then announce_arrival(q) end
  end
  write('ZADD', q.delayed, out.delayed)
  for i = 1, #out.delayed, 2 do
    announce_due(q, tonumber(out.delayed[i]))
  end
  write('ZADD', q.leases, out.leases)
  table.sort(out.buried, function(a, b)
    if a.since ~= b.since then return a.since < b.since end
    return tonumber(a.id) < tonumber(b.id)
  end)
  local gone = {}
  for i, s in ipairs(out.buried) do
    local id = s.id
    local row = redis.call('HGET', q.rows, id)
    gone[i] = id
    if row then
      local first, key_bytes, header_bytes = struct.unpack('>I8I4I4', row)
      local key_ends = 16 + math.max(0, key_bytes - 1)
      local state = packed(s)
      local group_header = ''
      if string.sub(row, key_ends + 5, key_ends + 4 + #GROUP) == GROUP and header_bytes > 8 + #GROUP then
        local length = struct.unpack('>I4', row, key_ends + 5 + #GROUP)
        group_header = string.sub(row, key_ends + 1, key_ends + 8 + #GROUP + length)
      end
      local head = struct.pack('>I8I4I4', first, key_bytes, #group_header) .. string.sub(row, 17, key_ends)
        .. group_header
      local group = q.holds and groups_of(q, { id })[1]
      if group then
        redis.call('HINCRBY', q.held, group, 1)
        q.touched[group] = true
      end
      redis.call('HSET', q.dead_rows, id, row)
      redis.call('HSET', q.dead_cards, id,
        struct.pack('>I8I4', #row - key_ends - header_bytes, #state) .. state .. head)
      redis.call('ZADD', q.dead, text_of(next_number(q)), id)
    end
  end
  write('HDEL', q.rows, gone)
  write('HDEL', q.states, gone)
end

-- in_flight: how many rows of all groups are taken
local function rank_of(q, busy, in_flight)
  if not q.fair then return 0 end
  if q.by_noise then
    local is_noisy = busy >= NOISY_FROM and busy * NOISY_PART > in_flight
    busy = is_noisy and busy - NOISY_FROM + 1 or 0
  end
  return math.min(busy, MAX_RANK)
end

-- Of each group that was touched, lets the first row come if one more may be in flight, and no other.
local function settle(q)
  local groups = {}
  for group in pairs(q.touched) do groups[#groups + 1] = group end
  q.touched = {}
  if #groups == 0 then return end
  local busy, heads, held = read(q.busy, groups), read(q.heads, groups), q.holds and read(q.held, groups) or {}
  local firsts, head_ids, first_ids = {}, {}, {}
  for i, group in ipairs(groups) do
    busy[i] = tonumber(busy[i]) or 0
    local may_come = busy[i] == 0 and not held[i]
    if q.shares then may_come = not q.most or busy[i] < q.most end
    -- The first one that waits; true: none may come
    firsts[i] = not may_come or behind(q, group, 1)[1] or false
    head_ids[i] = heads[i] or ''
    first_ids[i] = may_come and firsts[i] and id_in(firsts[i], group) or ''
  end
  local head_states, first_states = read_states(q, head_ids), read_states(q, first_ids)
  local in_flight = q.by_noise and redis.call('ZCARD', q.taken) + q.being_taken
  local out, hidden, hidden_delayed, no_heads, new_heads, come, again = changes(), {}, {}, {}, {}, {}, {}
  for i, group in ipairs(groups) do
    local head, first = heads[i], firsts[i]
    local s = head_states[i] and unpacked(head_states[i])
    if s and (first == true or (first and first < member_of(group, s, head))) then
      table.insert(s.status == 'R' and hidden or hidden_delayed, head)
      wait_behind(q, out, head, s, group)
      s = nil
    end
    if s then
      if q.fair then
        table.insert(out.ready, score(s, rank_of(q, busy[i], in_flight)))
        table.insert(out.ready, head)
      end
    else
      if head then no_heads[#no_heads + 1] = group end
      if first and first ~= true then
        come[#come + 1] = first
        local f, id = first_states[i] and unpacked(first_states[i]), first_ids[i]
        if not f then again[group] = true -- others have removed it
        else
          new_heads[#new_heads + 1], new_heads[#new_heads + 2] = group, id
          if f.ends > q.now then
            f.status = 'D'
            table.insert(out.delayed, text_of(f.ends))
            table.insert(out.delayed, id)
          else
            f.status, f.ends = 'R', 0
            table.insert(out.ready, score(f, rank_of(q, busy[i], in_flight)))
            table.insert(out.ready, id)
          end
          table.insert(out.states, id)
          table.insert(out.states, packed(f))
        end
      end
    end
  end
  write('ZREM', q.ordered, hidden)
  write('ZREM', q.delayed, hidden_delayed)
  write('ZREM', q.behind, come)
  write('HDEL', q.heads, no_heads)
  write('HSET', q.heads, new_heads)
  apply(q, out)
  q.touched = again
  settle(q)
end

-- Carries out what the clock has brought, up to STEP rows of each kind; true if there is more of it.
local function pass_time(q)
  local due = redis.call('ZRANGE', q.delayed, 0, 0, 'WITHSCORES')[2]
  local ended = redis.call('ZRANGE', q.leases, 0, 0, 'WITHSCORES')[2]
  due, ended = tonumber(due), tonumber(ended)
  if (due and due <= q.now) or (ended and ended <= q.now) then
    local out = changes()
    local ids = redis.call('ZRANGEBYSCORE', q.delayed, '-inf', q.now, 'LIMIT', 0, STEP)
    for i, state in ipairs(read_states(q, ids)) do
      local group = state and q.shares and groups_of(q, { ids[i] })[1]
      if group then
        local s = unpacked(state)
        s.ends = 0
        wait_behind(q, out, ids[i], s, group)
      elseif state then
        local s = unpacked(state)
        s.status, s.ends = 'R', 0
        table.insert(out.ready, score(s))
        table.insert(out.ready, ids[i])
        table.insert(out.states, ids[i])
        table.insert(out.states, packed(s))
      end
    end
    write('ZREM', q.delayed, ids)
    local expired = redis.call('ZRANGEBYSCORE', q.leases, '-inf', q.now, 'LIMIT', 0, STEP)
    local rows = {}
    for i, state in ipairs(read_states(q, expired)) do
      if state then rows[#rows + 1] = { expired[i], unpacked(state) } end
    end
    -- Leases that end at the same time are in the order of texts, where 10 is less than 9.
    table.sort(rows, function(a, b)
      if a[2].ends ~= b[2].ends then return a[2].ends < b[2].ends end
      return a[2].place < b[2].place
    end)
    local ended_ids, ended_states = {}, {}
    for i, one in ipairs(rows) do ended_ids[i], ended_states[i] = one[1], packed(one[2]) end
    leave_groups(q, ended_ids, ended_states)
    for _, one in ipairs(rows) do requeue(q, out, one[1], one[2], one[2].ends, nil, true, 'expired') end
    write('ZREM', q.leases, expired)
    write('ZREM', q.taken, expired)
    apply(q, out)
    settle(q)
    due = tonumber(redis.call('ZRANGE', q.delayed, 0, 0, 'WITHSCORES')[2])
    ended = tonumber(redis.call('ZRANGE', q.leases, 0, 0, 'WITHSCORES')[2])
  end
  q.first_due = due and ended and math.min(due, ended) or due or ended
  return q.first_due and q.first_due <= q.now
end

-- The keys of a queue, each made when it is first used: q.rows is key:rows.
local IS_PART = {
  rows = true, states = true, fresh = true, ordered = true, delayed = true, taken = true, leases = true,
  digests = true, twins = true, dead = true, dead_rows = true, dead_cards = true, groups = true, behind = true,
  heads = true, busy = true, held = true, dedup = true, dedup_until = true,
}
local PARTS_OF = {
  __index = function(q, name)
    if not IS_PART[name] then return nil end
    local key = q.key .. ':' .. name
    q[name] = key
    return key
  end,
}

local function leave(q)
  if q.number ~= q.number_before then
    redis.call('HSET', q.key, 'number', text_of(q.number))
  end
end

-- The queue of this key, up to date with the clock, and with `numbers` numbers to spare; or nil and an error.
local function enter(key, numbers)
  local meta = redis.call('HMGET', key, 'number', 'last_number', 'arrivals', 'largest', 'max_redeliveries',
    'to_front', 'is_manual', 'at_most_once', 'more')
  if not meta[1] then
    return nil, redis.error_reply('KMQNOTFOUND')
  end
  local q = setmetatable({ key = key }, PARTS_OF)
  q.number, q.number_before = tonumber(meta[1]), tonumber(meta[1])
  q.arrivals, q.largest = tonumber(meta[3]), tonumber(meta[4])
  if not (q.number and tonumber(meta[2]) and q.arrivals and q.arrivals < 2 ^ 53 and q.largest) then
    return nil, redis.error_reply('WRONGTYPE ' .. key .. ' lacks numbers')
  end
  if not (q.number < PRIORITIES) then -- that is no comparison with nan
    return nil, redis.error_reply(TOO_LARGE)
  end
  if q.number + numbers + 2 * STEP > tonumber(meta[2]) then
    return nil, redis.error_reply('KMQNUMBERS ' .. text_of(q.number) .. ' ' .. text_of(numbers + 2 * STEP))
  end
  q.max_redeliveries = tonumber(meta[5]) -- nil: no limit
  q.to_front, q.is_manual, q.at_most_once = meta[6] == '1', meta[7] == '1', meta[8] == '1'
  q.touched, q.being_taken = {}, 0
  -- 1 if groups are in order, 1 if dead letters hold them, thousandths, delays, 1 if fair (2: by noise), most of a group in flight
  if meta[9] and meta[9] ~= '' then
    local in_groups, holds, jitter, retries, fair, most =
      string.match(meta[9], '^(%d) (%d) (%d+) ?([%d,]*) ?(%d?) ?(%d*)$')
    q.shares, q.fair, q.most = fair and fair ~= '', fair == '1' or fair == '2', tonumber(most)
    q.by_noise = fair == '2'
    q.in_groups, q.holds, q.jitter = in_groups == '1' or q.shares, holds == '1', tonumber(jitter or 0)
    if retries and retries ~= '' then
      q.retries = {}
      for delay in string.gmatch(retries, '%d+') do q.retries[#q.retries + 1] = tonumber(delay) end
    end
  end
  local time = redis.call('TIME')
  q.now = time[1] * 1000 + math.floor(time[2] / 1000)
  if pass_time(q) then
    leave(q)
    return nil, redis.error_reply('KMQAGAIN')
  end
  return q
end

-- Takes: pairs of id and number, as text (ANY: whoever has the row, or nobody yet) -> ids and states of the takes that
-- are current; the numbers of those that are not, from 1; and of the ids, which were named with ANY, and which are
-- fresh. `only_taken`: others are not current; 'unless any': unless they were named with ANY.
local function current(q, text, only_taken)
  local ids, takes = {}, {}
  for id, take in string.gmatch(text, '(%d+) (-?%d+)') do
    ids[#ids + 1] = id
    takes[#takes + 1] = tonumber(take)
  end
  local found, states, others, any, fresh, seen = {}, {}, {}, {}, {}, {}
  for i, state in ipairs(read_states(q, ids)) do
    local id, is_any = ids[i], takes[i] == ANY
    if is_any and not state then
      local row = read_rows(q, { id })[1]
      if row then
        fresh[id] = true
        state = packed(fresh_state(id, row))
      end
    end
    local status, take, _
    if state then
      status, _, take = struct.unpack('>c1BI4', state)
    end
    local is_current = state and (is_any or take == takes[i] and take > 0)
    if is_current and (status == 'T' or not only_taken or (is_any and only_taken == 'unless any')) then
      any[id] = any[id] or is_any
      if not seen[id] then
        seen[id] = true
        found[#found + 1] = id
        states[#states + 1] = state
      end
    else
      others[#others + 1] = i
    end
  end
  return found, states, others, any, fresh
end

-- Takes fresh rows out of their list, in which ids grow, and which may be long.
local function unlist_fresh(q, ids)
  local places, last = {}, redis.call('LLEN', q.fresh) - 1
  for _, id in ipairs(ids) do
    local low, high = 0, last
    while low < high do
      local middle = math.floor((low + high) / 2)
      local there = tonumber(redis.call('LINDEX', q.fresh, middle)) or 0
      if there < tonumber(id) then low = middle + 1 else high = middle end
    end
    if redis.call('LINDEX', q.fresh, low) == id then places[#places + 1] = low end
  end
  for _, place in ipairs(places) do
    redis.call('LSET', q.fresh, place, '0') -- no row has the id 0
  end
  if #places > 0 then redis.call('LREM', q.fresh, #places, '0') end
end

-- Rows are taken or gone, and collapse no more.
local function forget_digests(q, ids)
  if redis.call('HLEN', q.digests) == 0 then return end
  local members, known = {}, {}
  for i, digest in ipairs(read(q.digests, ids)) do
    if digest then
      members[#members + 1] = digest .. ids[i]
      known[#known + 1] = ids[i]
    end
  end
  write('ZREM', q.twins, members)
  write('HDEL', q.digests, known)
end

-- Takes rows out of the order or the index that they are in; their states say which, or the set of fresh ids.
local function unlist(q, ids, states, fresh)
  leave_groups(q, ids, states)
  local lists = { T = {}, R = {}, D = {}, W = {}, fresh = {} }
  for i, state in ipairs(states) do
    local is_fresh = fresh and fresh[ids[i]] and redis.call('HEXISTS', q.digests, ids[i]) == 0
    local list = is_fresh and lists.fresh or lists[string.sub(state, 1, 1)]
    list[#list + 1] = ids[i]
  end
  unlist_fresh(q, lists.fresh)
  write('ZREM', q.taken, lists.T)
  if not q.is_manual then write('ZREM', q.leases, lists.T) end
  write('ZREM', q.ordered, lists.R)
  write('ZREM', q.delayed, lists.D)
end

-- The first ready ids, in the order they are taken; and how many of them are fresh.
local function first_ready(q, count)
  local fresh = redis.call('LRANGE', q.fresh, 0, count - 1)
  local ordered = redis.call('ZRANGE', q.ordered, 0, count - 1, 'WITHSCORES')
  local ids, f, o = {}, 1, 1
  while #ids < count and (fresh[f] or ordered[o]) do
    if fresh[f] and (not ordered[o] or 9 * PRIORITIES + tonumber(fresh[f]) < tonumber(ordered[o + 1])) then
      ids[#ids + 1] = fresh[f]
      f = f + 1
    else
      ids[#ids + 1] = ordered[o]
      o = o + 2
    end
  end
  return ids, f - 1
end

-- Takes the first ready ids out of their order; also returns their states, which fresh rows have none of.
local function pop_ready(q, count)
  if redis.call('ZCARD', q.ordered) == 0 then
    return redis.call('LPOP', q.fresh, count) or {}, {}
  end
  local ids, fresh = first_ready(q, count)
  if fresh > 0 then redis.call('LPOP', q.fresh, fresh) end
  if #ids > fresh then redis.call('ZPOPMIN', q.ordered, #ids - fresh) end
  return ids, read_states(q, ids)
end

-- How many of the first ready rows come before those that wait behind them: in a queue that is fair, those of the
-- smallest rank.
local function before_followers(q)
  if not q.shares or redis.call('ZCARD', q.behind) == 0 then return math.huge end
  if not q.fair or q.by_noise then return 1 end
  local first = redis.call('ZRANGE', q.ordered, 0, 0, 'WITHSCORES')[2]
  if not first then return math.huge end
  local fresh = redis.call('LLEN', q.fresh)
  local rank = fresh > 0 and 9 or math.floor(tonumber(first) / PRIORITIES)
  return fresh + redis.call('ZCOUNT', q.ordered, '-inf', '(' .. text_of((rank + 1) * PRIORITIES))
end

-- Deletes the ready rows with this digest.
local function remove_twins(q, digest)
  local from = '[' .. digest
  repeat
    local members = redis.call('ZRANGEBYLEX', q.twins, from, '[' .. digest .. '\255', 'LIMIT', 0, PIECE)
    local ids, gone = {}, {}
    for i, member in ipairs(members) do ids[i] = string.sub(member, DIGEST_BYTES + 1) end
    for i, state in ipairs(read_states(q, ids)) do
      if not state or string.sub(state, 1, 1) == 'R' then gone[#gone + 1] = ids[i] end -- D: not ready yet
    end
    write('ZREM', q.ordered, gone)
    write('HDEL', q.rows, gone)
    write('HDEL', q.states, gone)
    forget_digests(q, gone)
    from = members[1] and '(' .. members[#members]
  until #members < PIECE
end

-- Of ids in order, those that are handed out: not if a row with the same digest comes before. Deletes the others,
-- and all their twins.
local function collapse(q, ids, states)
  local chosen, states_of_chosen, digests, seen = {}, {}, {}, {}
  for i, digest in ipairs(read(q.digests, ids)) do
    if not digest or not seen[digest] then
      chosen[#chosen + 1] = ids[i]
      states_of_chosen[#chosen] = states[i] or false
      if digest then
        seen[digest] = true
        digests[#digests + 1] = digest
      end
    end
  end
  forget_digests(q, chosen)
  for _, digest in ipairs(digests) do remove_twins(q, digest) end
  return chosen, states_of_chosen
end

-- A row as rows.py reads it.
local function shown(id, state, row, size)
  return struct.pack('>I8I8I4I4', tonumber(id) or 0, size or 0, #state, #row) .. state .. row
end

-- How many rows to read at a time, so that a reply does not become much larger than BYTES.
local function piece_of(q)
  return math.max(1, math.min(PIECE, math.floor(BYTES / q.largest)))
end

-- Calls `use(id, state, row)` for these rows until BYTES are reached; returns how many it was called for.
local function each_row(q, ids, use)
  local bytes, done, piece = 0, 0, piece_of(q)
  while done < #ids and bytes < BYTES do
    local some = { unpack(ids, done + 1, math.min(done + piece, #ids)) }
    local states, rows = read_states(q, some), read_rows(q, some)
    for i, id in ipairs(some) do
      if rows[i] then
        use(id, states[i] or packed(fresh_state(id, rows[i])), rows[i])
        bytes = bytes + #rows[i] + SHOWN_BYTES
      end
    end
    done = done + #some
  end
  return done
end

-- The functions ----------------------------------------------------------------------------------

local calls = {}

-- The dedup keys that stand in `listed`, each with the id of the row that has it; without those that are free.
local function holders_of(q, listed, until_acknowledged)
  local keys, holders = {}, {}
  for at = 1, #listed, KEY_BYTES do keys[#keys + 1] = string.sub(listed, at, at + KEY_BYTES - 1) end
  for i, found in ipairs(read(q.dedup, keys)) do
    local id, ends = string.match(found or '', '^(%d+) (%d+)$')
    local has = id and (until_acknowledged and redis.call('HEXISTS', q.rows, id) == 1
      or not until_acknowledged and tonumber(ends) > q.now)
    if has then holders[keys[i]] = id end
  end
  return holders
end

-- Removes up to `count` keys whose time is over.
local function forget_keys(q, until_acknowledged, count)
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', q.dedup_until, '-inf', q.now, 'LIMIT', 0, count)) do
    local id = string.match(redis.call('HGET', q.dedup, key) or '', '^%d+')
    local is_there = id and (redis.call('HEXISTS', q.rows, id) == 1 or redis.call('HEXISTS', q.dead_rows, id) == 1)
    if until_acknowledged and is_there then
      redis.call('ZADD', q.dedup_until, text_of(q.now + LEAST_WINDOW_MS), key)
    else
      redis.call('HDEL', q.dedup, key)
      redis.call('ZREM', q.dedup_until, key)
    end
  end
end

-- plain: '', or `delay priority` of each row; '', or the digests of the rows, one after the other; '', or their groups,
-- each with a NUL behind it; '', or window, 1 if keys last until acknowledged, and the dedup keys, or as many spaces;
-- then the rows.
-- -> the first id, of ids without gaps; with dedup keys all ids, as text
function calls.put(q, args)
  local keys = args[4] ~= '' and args[4]
  if not keys then return calls.put_all(q, args) end
  local window, ua, listed = string.match(keys, '^(%d+) (%d) (.*)$')
  local until_acknowledged = ua == '1'
  window = until_acknowledged and math.max(tonumber(window), LEAST_WINDOW_MS) or tonumber(window)
  local groups = string.gmatch(args[3], '([^%z]*)%z')
  local options = string.gmatch(args[1], '%d+ %d+')
  local ids, new = {}, { {}, {}, {} }
  local rows, kept, until_ms = {}, {}, {}
  local holders, ends = holders_of(q, listed, until_acknowledged), text_of(q.now + window)
  local next_id = q.number
  for i = 5, #args do
    local key = string.sub(listed, (i - 5) * KEY_BYTES + 1, (i - 4) * KEY_BYTES)
    local group, option = args[3] ~= '' and groups(), args[1] ~= '' and options()
    local is_keyed = string.byte(key) ~= 32
    local holder = is_keyed and holders[key]
    if not holder then
      next_id = next_id + 1
      holder = text_of(next_id)
      rows[#rows + 1] = args[i]
      if group then new[1][#rows] = group end
      if option then new[2][#rows] = option end
      if args[2] ~= '' then
        new[3][#rows] = string.sub(args[2], (i - 5) * DIGEST_BYTES + 1, (i - 4) * DIGEST_BYTES)
      end
      if is_keyed then
        holders[key] = holder
        kept[#kept + 1], until_ms[#until_ms + 1] = key, ends
        kept[#kept + 1], until_ms[#until_ms + 1] = holder .. ' ' .. ends, key
      end
    end
    ids[#ids + 1] = holder
  end
  write('HSET', q.dedup, kept)
  write('ZADD', q.dedup_until, until_ms)
  forget_keys(q, until_acknowledged, 2 * #ids)
  if #rows > 0 then
    local groups_text = #new[1] > 0 and table.concat(new[1], '\0') .. '\0' or ''
    local given = { table.concat(new[2], ','), table.concat(new[3]), groups_text, '' }
    for i, row in ipairs(rows) do given[i + 4] = row end
    calls.put_all(q, given)
  end
  return table.concat(ids, ' ')
end

function calls.put_all(q, args)
  local plain, count, rows, fresh = args[1] == '', #args - 4, {}, {}
  local collapses, digests, twins, groups_of_ids = args[2] ~= '', {}, {}, {}
  local is_grouped = q.in_groups and args[3] ~= ''
  local groups = is_grouped and string.gmatch(args[3], '([^%z]*)%z')
  local options = not plain and string.gmatch(args[1], '(%d+) (%d+)')
  local out = (is_grouped or collapses or not plain) and changes()
  local time, largest = struct.pack('>I8', q.now), q.largest
  local first = text_of(q.number + 1)
  for i = 1, count do
    local number = next_number(q)
    local id, row = text_of(number), time .. args[i + 4]
    rows[#rows + 1] = id
    rows[#rows + 1] = row
    largest = math.max(largest, #row)
    local delay, priority = '0', '0'
    if not plain then delay, priority = options() end
    if collapses then
      local digest = string.sub(args[2], (i - 1) * DIGEST_BYTES + 1, i * DIGEST_BYTES)
      digests[2 * i - 1], digests[2 * i] = id, digest
      twins[2 * i - 1], twins[2 * i] = '0', digest .. id
    end
    local group = is_grouped and groups()
    if group and group ~= '' then
      groups_of_ids[#groups_of_ids + 1] = id
      groups_of_ids[#groups_of_ids + 1] = group
    end
    if group and group ~= '' and not (q.shares and delay ~= '0') then
      local s = fresh_state(id, row)
      s.ends = delay == '0' and 0 or q.now + tonumber(delay)
      wait_behind(q, out, id, s, group)
    elseif delay == '0' and priority == '0' and collapses then
      table.insert(out.ready, score({ priority = 0, place = number }))
      table.insert(out.ready, id)
    elseif delay == '0' and priority == '0' then
      fresh[#fresh + 1] = id
    else
      local s = fresh_state(id, row)
      s.priority = tonumber(priority)
      if delay == '0' then
        table.insert(out.ready, score(s))
        table.insert(out.ready, id)
      else
        s.status, s.ends = 'D', q.now + tonumber(delay)
        table.insert(out.delayed, text_of(s.ends))
        table.insert(out.delayed, id)
      end
      table.insert(out.states, id)
      table.insert(out.states, packed(s))
    end
  end
  write_many('HSET', 'HDEL', q.rows, rows)
  if collapses then
    write_many('HSET', 'HDEL', q.digests, digests)
    write('ZADD', q.twins, twins)
  end
  if is_grouped then write('HSET', q.groups, groups_of_ids) end
  if largest > q.largest then redis.call('HSET', q.key, 'largest', text_of(largest)) end
  if #fresh > 0 then
    local length = write('RPUSH', q.fresh, fresh)
    if length == #fresh and redis.call('ZCARD', q.ordered) == 0 then announce_arrival(q) end
  end
  if out then apply(q, out) end
  return first
end

-- As pop_ready(), but behind each row come those of its group, unless they wait for a time to come.
local function pop_groups(q, count)
  local following, members, heads = {}, {}, 0
  for i, group in ipairs(groups_of(q, (first_ready(q, count)))) do
    if heads + #members == count then break end
    heads, following[i] = i, { {}, {} }
    local left = count - heads - #members
    local found = group and left > 0 and behind(q, group, math.min(left, PIECE)) or {}
    local ids = {}
    for k, member in ipairs(found) do ids[k] = id_in(member, group) end
    for k, state in ipairs(read_states(q, ids)) do
      if not state or struct.unpack('>I8', state, ENDS_AT) > q.now then break end
      following[i][1][k], following[i][2][k] = ids[k], state
      members[#members + 1] = found[k]
    end
  end
  if heads == 0 then return {}, {} end
  local ids, states = {}, {}
  local first_ids, first_states = pop_ready(q, heads)
  for i, id in ipairs(first_ids) do
    ids[#ids + 1] = id
    states[#ids] = first_states[i]
    for k, follower in ipairs(following[i][1]) do
      ids[#ids + 1] = follower
      states[#ids] = following[i][2][k]
    end
  end
  write('ZREM', q.behind, members)
  return ids, states
end

-- limit, lease_ms, 1 for one row of a group at most
function calls.take(q, args)
  local limit, ends = tonumber(args[1]), q.now + tonumber(args[2])
  local ends_text, reply, count, bytes, piece = text_of(ends), {}, 0, 0, piece_of(q)
  -- Of another type they raise an error here, before ids are out of their order.
  redis.call('HLEN', q.rows)
  redis.call('HLEN', q.states)
  redis.call('ZCARD', q.taken)
  redis.call('ZCARD', q.twins)
  local collapses = redis.call('HLEN', q.digests) > 0
  local pop = (not q.in_groups or q.shares or args[3] == '1') and pop_ready or pop_groups
  while count < limit and bytes < BYTES do
    local ids, states = pop(q, math.min(piece, limit - count, before_followers(q)))
    if #ids == 0 then break end
    if q.in_groups then
      local groups, heads = groups_of(q, ids), {}
      for _, group in ipairs(groups) do
        if group then
          heads[#heads + 1] = group
          if q.shares then q.touched[group] = true end -- else none of it may come now
        end
      end
      write('HDEL', q.heads, heads)
      count_busy(q, groups, 1)
      q.being_taken = #ids
      settle(q)
      q.being_taken = 0
    end
    if collapses then ids, states = collapse(q, ids, states) end
    local rows = read_rows(q, ids)
    local new_states, taken, leases, n = {}, {}, {}, 0
    for i, id in ipairs(ids) do
      local row = rows[i]
      if row then
        local state
        if states[i] then
          local s = unpacked(states[i])
          s.status, s.take, s.since, s.ends = 'T', s.take + 1, q.now, ends
          state = packed(s)
        else
          local first = struct.unpack('>I8', row)
          state = struct.pack(STATE, 'T', 0, 1, 0, first, q.now, ends, tonumber(id), 0)
        end
        reply[#reply + 1] = shown(id, state, row)
        bytes = bytes + #row + SHOWN_BYTES
        new_states[n + 1], new_states[n + 2] = id, state
        taken[n + 1], taken[n + 2] = id, id
        leases[n + 1], leases[n + 2] = ends_text, id
        n = n + 2
      end
    end
    count = count + #ids
    if not q.at_most_once then
      write_many('HSET', 'HDEL', q.states, new_states)
      write_many('ZADD', 'ZREM', q.taken, taken)
      if not q.is_manual and n > 0 then
        write_many('ZADD', 'ZREM', q.leases, leases)
        announce_due(q, ends)
      end
    else
      write('HDEL', q.rows, ids)
      write('HDEL', q.states, ids)
    end
  end
  return { q.now, q.first_due or -1, q.arrivals, table.concat(reply) }
end

-- takes
function calls.finish(q, args)
  local ids, states, _, _, fresh = current(q, args[1])
  unlist(q, ids, states, fresh)
  forget_digests(q, ids)
  write('HDEL', q.rows, ids)
  write('HDEL', q.states, ids)
  if q.in_groups then write('HDEL', q.groups, ids) end
  return #ids
end

-- Adds rows that a take has deleted, as taken ones without a lease (rule 9 of Engine); what follows in the same call
-- changes that. From args[first] on: numbers of a row as text, then the row.
local function add_again(q, args, first)
  local largest = q.largest
  for i = first, #args, 2 do
    local numbers, row = {}, args[i + 1]
    for number in string.gmatch(args[i], '%d+') do numbers[#numbers + 1] = number end
    local id = numbers[1]
    if redis.call('HEXISTS', q.rows, id) == 0 and redis.call('HEXISTS', q.dead_rows, id) == 0 then
      redis.call('HSET', q.rows, id, row)
      redis.call('HSET', q.states, id, packed({
        status = 'T', priority = numbers[2], take = numbers[3], requeues = numbers[4], enqueued = numbers[5],
        since = q.now, ends = q.now, place = numbers[6],
      }))
      redis.call('ZADD', q.taken, id, id)
      largest = math.max(largest, #row)
    end
  end
  if largest > q.largest then redis.call('HSET', q.key, 'largest', text_of(largest)) end
end

-- takes, delay_ms or '', 1 if it counts, 1 if there is a reason, the reason, rows that are gone
function calls.give_back(q, args)
  add_again(q, args, 6)
  local ids, states = current(q, args[1], true)
  local out, delay, count = changes(), tonumber(args[2]), args[3] == '1'
  local reason = args[4] == '1' and args[5] or nil
  unlist(q, ids, states)
  for i, id in ipairs(ids) do
    requeue(q, out, id, unpacked(states[i]), q.now, delay, count, reason)
  end
  apply(q, out)
  return #ids
end

-- takes, lease_ms -> the numbers of those that are lost
function calls.extend(q, args)
  local ids, states, lost, any, fresh = current(q, args[1], 'unless any')
  local out, ends, others, states_of_others = changes(), q.now + tonumber(args[2]), {}, {}
  for i, id in ipairs(ids) do
    local s = unpacked(states[i])
    if s.status ~= 'T' then
      others[#others + 1], states_of_others[#others + 1] = id, states[i]
      s.status, s.take, s.since, s.ends = 'T', s.take + 1, q.now, ends
    else
      s.ends = any[id] and math.max(s.ends, ends) or ends
    end
    table.insert(out.states, id)
    table.insert(out.states, packed(s))
    if not q.is_manual then
      table.insert(out.leases, text_of(s.ends))
      table.insert(out.leases, id)
    end
  end
  unlist(q, others, states_of_others, fresh)
  forget_digests(q, others)
  for _, id in ipairs(others) do redis.call('ZADD', q.taken, id, id) end
  count_busy(q, groups_of(q, others), 1)
  apply(q, out)
  if #out.leases > 0 then announce_due(q, ends) end
  return lost
end

-- takes, reason, rows that are gone
function calls.bury(q, args)
  add_again(q, args, 3)
  local ids, states, _, _, fresh = current(q, args[1])
  local out = changes()
  unlist(q, ids, states, fresh)
  forget_digests(q, ids)
  for i, id in ipairs(ids) do
    local s = unpacked(states[i])
    s.reason = args[2]
    bury_row(out, id, s, q.now)
  end
  apply(q, out)
  return #ids
end

-- Ids of taken rows behind a place in their order ('': all), and the place of each. That is its score, which is the
-- id, unless somebody else has written it.
local function taken_after(q, after)
  local first = after == '' and '-inf' or '(' .. after
  local found = redis.call('ZRANGEBYSCORE', q.taken, first, '+inf', 'WITHSCORES', 'LIMIT', 0, STEP)
  local ids, places = {}, {}
  for i = 1, #found, 2 do
    ids[#ids + 1], places[#places + 1] = found[i], found[i + 1]
  end
  return ids, places
end

-- after: a place -> how many, and the last place; call it again from there until that is ''
function calls.release(q, args)
  local ids, places = taken_after(q, args[1])
  local out, done, states = changes(), {}, {}
  for i, state in ipairs(read_states(q, ids)) do
    if state then
      done[#done + 1] = ids[i]
      states[#states + 1] = state
    end
  end
  unlist(q, done, states)
  for i, id in ipairs(done) do
    local s = unpacked(states[i])
    requeue(q, out, id, s, q.now, 0, false, s.reason)
  end
  apply(q, out)
  return { #done, places[#places] or '' }
end

-- offset, limit -> how many ids were looked at, rows
function calls.peek(q, args)
  local offset, reply = tonumber(args[1]), {}
  local first, ids = first_ready(q, offset + tonumber(args[2])), {}
  for i = offset + 1, #first do ids[#ids + 1] = first[i] end
  local done = each_row(q, ids, function(id, state, row)
    reply[#reply + 1] = shown(id, state, row)
  end)
  return { done, table.concat(reply) }
end

-- Other settings may let more of a group come.
function calls.settle_busy(q)
  for _, group in ipairs(redis.call('HKEYS', q.busy)) do q.touched[group] = true end
end

function calls.counts(q)
  return {
    redis.call('LLEN', q.fresh) + redis.call('ZCARD', q.ordered) + (q.in_groups and redis.call('ZCARD', q.behind) or 0),
    redis.call('ZCARD', q.delayed),
    redis.call('ZCARD', q.taken),
    redis.call('ZCARD', q.dead),
    q.holds and redis.call('HLEN', q.held) or 0,
  }
end

-- after, limit, taken before, queued before (in ms; '+inf') -> the last place looked at ('' at the end), rows
function calls.taken(q, args)
  local limit, taken_before, queued_before = tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
  if taken_before then taken_before = q.now - taken_before end
  local ids, places = taken_after(q, args[1])
  local chosen, last, reply = {}, nil, {}
  for i, state in ipairs(read_states(q, ids)) do
    if #chosen == limit then break end
    last = places[i]
    local id = state and tonumber(ids[i])
    if id and id < 2 ^ 53 and text_of(id) == ids[i] then
      local s = unpacked(state)
      if id ~= tonumber(places[i]) then
        -- Others have moved it. A caller goes on behind the last id, and could come here again for ever.
        redis.call('ZADD', q.taken, ids[i], ids[i])
      elseif (not taken_before or s.since < taken_before) and (not queued_before or s.enqueued < queued_before) then
        chosen[#chosen + 1] = ids[i]
      end
    end
  end
  local done = each_row(q, chosen, function(id, state, row)
    reply[#reply + 1] = shown(id, state, row)
  end)
  if done < #chosen then last = chosen[done] end
  return { last or '', table.concat(reply) }
end

function calls.purge(q)
  local count = redis.call('HLEN', q.rows)
  for _, part in ipairs(PARTS) do
    redis.call('UNLINK', q.key .. part)
  end
  if q.in_groups then
    local dead, kept = redis.call('ZRANGE', q.dead, 0, -1), {}
    for i, group in ipairs(groups_of(q, dead)) do
      if group then
        kept[#kept + 1] = dead[i]
        kept[#kept + 1] = group
      end
    end
    redis.call('UNLINK', q.groups)
    write('HSET', q.groups, kept)
  end
  return count
end

-- The state and the head of a dead row, and the bytes of its body; nothing of what is damaged or not there.
local function unpacked_card(card)
  if card and #card >= CARD_BYTES + STATE_BYTES then
    local size, state_bytes, at = struct.unpack('>I8I4', card)
    if state_bytes >= STATE_BYTES and #card >= at - 1 + state_bytes + ROW_BYTES then
      return string.sub(card, at, at + state_bytes - 1), string.sub(card, at + state_bytes), size
    end
  end
end

-- offset, limit, 1 for bodies, too -> rows; of a damaged one, its id
function calls.dead(q, args)
  local offset, limit, reply = tonumber(args[1]), tonumber(args[2]), {}
  local most = args[3] == '1' and piece_of(q) or STEP
  local ids = redis.call('ZRANGE', q.dead, offset, offset + math.min(limit, most) - 1)
  local rows = args[3] == '1' and read_whole(q.dead_rows, ids, ROW_BYTES)
  local nothing = string.rep('\0', ROW_BYTES)
  for i, card in ipairs(read(q.dead_cards, ids)) do
    local state, head, size = unpacked_card(card)
    state = state or packed(fresh_state(ids[i], nothing))
    reply[i] = shown(ids[i], state, rows and rows[i] or head or nothing, size)
  end
  return table.concat(reply)
end

-- ids, as text; or '' and how many of the oldest
function calls.redrive(q, args)
  local ids = {}
  if args[1] == '' then
    ids = redis.call('ZRANGE', q.dead, 0, tonumber(args[2]) - 1)
  else
    for id in string.gmatch(args[1], '%d+') do ids[#ids + 1] = id end
  end
  local cards, out, done = read(q.dead_cards, ids), changes(), {}
  for i, id in ipairs(ids) do
    local state = unpacked_card(cards[i])
    local row = state and redis.call('HGET', q.dead_rows, id)
    if row then
      local s = unpacked(state)
      s.status, s.requeues, s.enqueued, s.since, s.reason = 'R', 0, q.now, 0, nil
      if not q.holds then s.place = next_number(q) end
      redis.call('HSET', q.rows, id, row)
      local group = groups_of(q, { id })[1]
      if group then
        if q.holds then count_down(q.held, group) end
        wait_behind(q, out, id, s, group)
      else
        table.insert(out.ready, score(s))
        table.insert(out.ready, id)
        table.insert(out.states, id)
        table.insert(out.states, packed(s))
      end
      done[#done + 1] = id
    end
  end
  write('ZREM', q.dead, done)
  write('HDEL', q.dead_rows, done)
  write('HDEL', q.dead_cards, done)
  apply(q, out)
  return #done
end

function calls.purge_dead(q)
  local count = redis.call('ZCARD', q.dead)
  if q.in_groups then
    for _, group in ipairs(redis.call('HKEYS', q.held)) do q.touched[group] = true end
    write('HDEL', q.groups, redis.call('ZRANGE', q.dead, 0, -1))
  end
  for _, part in ipairs(DEAD_PARTS) do
    redis.call('UNLINK', q.key .. part)
  end
  return count
end

-- Redis 7.0 has no pairs() and the like while it loads a library; so each call is named here.
-- numbers: how many of them the call uses up, beyond what the clock brings.
local function register(name, call, flags, numbers)
  redis.register_function({
    function_name = LIBRARY .. name,
    flags = flags,
    callback = function(keys, args)
      local q, refusal = enter(keys[1], numbers and numbers(args) or STEP)
      if not q then return refusal end
      local reply = call(q, args)
      settle(q)
      leave(q)
      return reply
    end,
  })
end

-- A full server still lets go of what is done; only a put needs room.
local WHEN_FULL = { 'allow-oom' }

local function rows_of(args) return #args end
local function takes_of(args) return #args[1] end -- more than enough

register('put', calls.put, {}, rows_of)
register('take', calls.take, WHEN_FULL)
register('finish', calls.finish, WHEN_FULL)
register('give_back', calls.give_back, WHEN_FULL, takes_of)
register('extend', calls.extend, WHEN_FULL)
register('bury', calls.bury, WHEN_FULL, takes_of)
register('release', calls.release, WHEN_FULL)
register('peek', calls.peek, WHEN_FULL)
register('counts', calls.counts, WHEN_FULL)
register('settle_busy', calls.settle_busy, WHEN_FULL)
register('taken', calls.taken, WHEN_FULL)
register('purge', calls.purge, WHEN_FULL)
register('dead', calls.dead, WHEN_FULL)
register('redrive', calls.redrive, WHEN_FULL)
register('purge_dead', calls.purge_dead, WHEN_FULL)

-- Making and deleting a queue --------------------------------------------------------------------

-- names and values of the fields
redis.register_function(LIBRARY .. 'make', function(keys, args)
  if redis.call('EXISTS', keys[1]) == 0 then
    redis.call('HSET', keys[1], unpack(args))
    redis.call('EXPIRE', keys[1], UNSETTLED_S)
  end
end)

-- the limit, or an empty text; what enter() reads as `more`
redis.register_function(LIBRARY .. 'limit', function(keys, args)
  if redis.call('EXISTS', keys[1]) == 1 then
    redis.call('HSET', keys[1], 'max_redeliveries', args[1], 'more', args[2])
  end
end)

-- Keeps a queue for good once it is registered; 0 if there is none, -1 if others have deleted a part of it.
redis.register_function(LIBRARY .. 'settle', function(keys)
  redis.call('PERSIST', keys[1])
  if redis.call('EXISTS', keys[1]) == 1 then return 1 end
  for _, names in ipairs({ PARTS, DEAD_PARTS }) do
    for _, part in ipairs(names) do
      if redis.call('EXISTS', keys[1] .. part) == 1 then return -1 end
    end
  end
  return 0
end)

-- first, last: numbers for a queue, unless somebody else gave it larger ones just now
redis.register_function(LIBRARY .. 'number', function(keys, args)
  local number = redis.call('HGET', keys[1], 'number')
  if number and tonumber(args[1]) > tonumber(number) then
    redis.call('HSET', keys[1], 'number', args[1], 'last_number', args[2])
  end
end)

redis.register_function({
  function_name = LIBRARY .. 'delete',
  flags = { 'allow-oom' },
  callback = function(keys)
    local there = redis.call('UNLINK', keys[1])
    for _, names in ipairs({ PARTS, DEAD_PARTS, OTHER_PARTS }) do
      for _, part in ipairs(names) do
        redis.call('UNLINK', keys[1] .. part)
      end
    end
    redis.call('PUBLISH', keys[1], 'a ' .. text_of(2 ^ 53)) -- who waits for a message learns of it
    return there
  end,
})

-- The storage: KEYS[1] a hash, KEYS[2] a hash name -> generation and settings --------------------

-- format, an id for a new storage -> the format and the id that it has
redis.register_function(LIBRARY .. 'open', function(keys, args)
  local kind = redis.call('TYPE', keys[1]).ok
  if kind == 'none' then
    redis.call('HSET', keys[1], 'format', args[1], 'id', args[2], 'number', '0')
  end
  local found = redis.call('HMGET', keys[1], 'format', 'id', 'number')
  if not (found[1] and found[2] and found[3]) then
    return redis.error_reply('WRONGTYPE a hash without the fields of kmqpy')
  end
  return found
end)

-- how many, larger than -> the last of a block of numbers that nobody else gets
redis.register_function(LIBRARY .. 'allot', function(keys, args)
  local number = redis.call('HGET', keys[1], 'number')
  if not number then return redis.error_reply('KMQEMPTIED') end
  local last = math.max(tonumber(number), tonumber(args[2])) + tonumber(args[1])
  if last >= PRIORITIES then return redis.error_reply(TOO_LARGE) end
  redis.call('HSET', keys[1], 'number', text_of(last))
  return text_of(last)
end)

-- name, generation, settings -> whether the name is this generation's
redis.register_function(LIBRARY .. 'register', function(keys, args)
  if redis.call('EXISTS', keys[1]) == 0 then return redis.error_reply('KMQEMPTIED') end
  local value = args[2] .. ' ' .. args[3]
  redis.call('HSETNX', keys[2], args[1], value)
  return redis.call('HGET', keys[2], args[1]) == value and 1 or 0
end)

-- name, what is registered for it (generation, a space, settings), what is to be -> whether it was
redis.register_function(LIBRARY .. 'alter', function(keys, args)
  if redis.call('HGET', keys[2], args[1]) ~= args[2] then return 0 end
  redis.call('HSET', keys[2], args[1], args[3])
  return 1
end)

-- name, generation -> how many there were
redis.register_function({
  function_name = LIBRARY .. 'forget',
  flags = { 'allow-oom' },
  callback = function(keys, args)
    local value = redis.call('HGET', keys[2], args[1])
    if value and string.sub(value, 1, #args[2] + 1) == args[2] .. ' ' then
      return redis.call('HDEL', keys[2], args[1])
    end
    return 0
  end,
})
