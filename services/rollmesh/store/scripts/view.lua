#!lua flags=allow-oom
-- Reads a consistent view of the mesh in O(bound). ARGV: bound (groups per list), 0 for a view without single groups;
-- '1' to list the ready groups with the fewest tokens too.
-- Returns a map. `ready` has (id, index, step, tokens) of each ready group, `open` (id, index, step) of the open groups
-- with the smallest step (those without tokens last), `unclaimed` (step, groups, ready groups) over all open and ready
-- groups with tokens, `undecided_groups` the open groups that wait for the leader's decision, `aside` the ids of the
-- oldest groups that were set aside.
local bound = tonumber(ARGV[1])
local is_recovering = recovering() and 1 or 0
local meta = call('HMGET', K.meta, 'trained_step', 'cut_step', 'policy_version', 'policy_train_step',
  'filtered_in_a_row', 'blocked_since', 'user_paused', 'unscored_in_a_row', 'abandoned_to', 'failure',
  'failure_leader', 'leader', 'launcher_paused', 'recalled_for', 'recalled', 'ready_ms', 'update_ms',
  'ready_updates', 'pinned', 'pin_instance', 'waiting')
local desired = call('HMGET', K.desired, 'pool_size', 'paused', 'interrupt_below_version', 'reason', 'start_at_version',
  'waiting_for', 'rest_before_step', 'cache_pool', 'most_waiting')
local counts = call('HMGET', K.counts, 'leased', 'finished', 'saved_bytes_total', 'finished_total',
  'prompt_bytes_total', 'prompts_total')
local open_count, ready_count, cut_count = call('ZCARD', K.open), call('ZCARD', K.ready), call('HLEN', K.cut)
local pending, partial, resting = call('ZCARD', K.pending), call('ZCARD', K.partial), call('ZCARD', K.resting)

-- Used memory plus the expected writes of the pool: unfinished trajectories at the mean saved size.
local memory = call('INFO', 'memory')
local limit = tonumber(string.match(memory, '\nmaxmemory:(%d+)'))
local used = tonumber(string.match(memory, 'used_memory:(%d+)'))
local finished_total = tonumber(counts[4] or '0')
local expected = used
if finished_total > 0 then
  local unfinished = tonumber(counts[1] or '0') + partial + resting + pending
  expected = used + unfinished * tonumber(counts[3] or '0') / finished_total
end
local ratio = limit > 0 and tostring(expected / limit) or '0'

-- Groups recalled for the next batch.
local recalled = tonumber(meta[14]) == tonumber(meta[2]) + 1 and meta[15] or '0'

-- The pin of a generator that has left or died pins none, until its evaluation pins another.
local instance = meta[20] or ''
if instance ~= '' and tonumber(call('ZSCORE', K.generator_expiry, instance) or '0') < now() then
  meta[19], instance = false, ''
end

-- During a rollback nothing can be cut, so the leader gets no ready groups.
local ready, ids, seen = {}, {}, {}
local lists = (meta[9] or bound == 0) and {} or {K.ready, K.ready_steps}
if #lists > 0 and ARGV[2] == '1' then lists[3] = K.ready_tokens end
for _, key in ipairs(lists) do
  for _, gid in ipairs(call('ZRANGE', key, 0, bound - 1)) do
    if not seen[gid] then
      seen[gid] = true
      ids[#ids + 1] = gid
    end
  end
end
for first = 1, #ids, 1000 do
  local last = math.min(first + 999, #ids)
  local indexes = call('ZMSCORE', K.ready, unpack(ids, first, last))
  local steps = call('ZMSCORE', K.ready_steps, unpack(ids, first, last))
  local tokens = call('ZMSCORE', K.ready_tokens, unpack(ids, first, last))
  for at = first, last do
    local n = at - first + 1
    ready[#ready + 1] = {ids[at], indexes[n], steps[n], tokens[n]}
  end
end

local open = {}
local stalest = bound > 0 and call('ZRANGE', K.open_steps, 0, bound - 1, 'WITHSCORES') or {}
for at = 1, #stalest, 2 do
  local index = call('ZSCORE', K.open, stalest[at])
  -- During a recovery this index may have entries of groups that are not open.
  if index then open[#open + 1] = {stalest[at], index, stalest[at + 1]} end
end
if #stalest < 2 * bound then
  for _, gid in ipairs(call('ZRANGE', K.open, 0, bound - 1)) do
    if not call('ZSCORE', K.open_steps, gid) then open[#open + 1] = {gid, call('ZSCORE', K.open, gid), 'inf'} end
  end
end

-- Groups beyond the staleness bound are evicted, so the range of steps is short.
local newest, oldest = tonumber(meta[4] or '-1'), math.huge
for _, key in ipairs({K.open_steps, K.ready_steps}) do
  local lowest = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if lowest[2] and lowest[2] ~= 'inf' then oldest = math.min(oldest, tonumber(lowest[2])) end
end
local unclaimed = {}
if oldest < math.huge then
  for step = oldest, math.min(newest, oldest + 255) do
    local open_here, ready_here = call('ZCOUNT', K.open_steps, step, step), call('ZCOUNT', K.ready_steps, step, step)
    if open_here + ready_here > 0 then unclaimed[#unclaimed + 1] = {step, open_here + ready_here, ready_here} end
  end
end
return {map = {
  now = integer(now()), recovering = is_recovering,
  trained_step = meta[1], cut_step = meta[2], policy_version = meta[3], policy_train_step = meta[4],
  admitted_groups = open_count + ready_count + cut_count, open_groups = open_count, ready_groups = ready_count,
  pending = pending, partial = partial, resting = resting, leased = counts[1] or '0', finished = counts[2] or '0',
  waiting = meta[21] or '0',
  filtered_in_a_row = meta[5], unscored_in_a_row = meta[8] or '0', blocked_since = meta[6] or '',
  user_paused = meta[7] or '0', rolling_back = meta[9] and '1' or '0', launcher_paused = meta[13] or '0',
  failure = meta[10] and meta[11] == meta[12] and meta[10] or '',
  memory_ratio = ratio, used_memory = used, max_memory = limit, saved_bytes_total = counts[3] or '0',
  finished_total = finished_total, prompt_bytes_total = counts[5] or '0', prompts_total = counts[6] or '0',
  generators = call('ZCOUNT', K.generator_expiry, now(), '+inf'), pinned_version = meta[19] or '',
  pinned_instance = instance,
  pool_size = desired[1] or '0', paused = desired[2] or '0', interrupt_below_version = desired[3] or '0',
  reason = desired[4] or '', start_at_version = desired[5] or '0', waiting_for = desired[6] or '',
  rest_before_step = desired[7] or '0', cache_pool = desired[8] or '', most_waiting = desired[9] or '0',
  ready_ms = meta[16] or '', update_ms = meta[17] or '', ready_updates = meta[18] or '',
  settings = call('HGETALL', K.settings), ready = ready, open = open, unclaimed = unclaimed,
  undecided_groups = call('ZCARD', K.undecided), aside_groups = call('ZCARD', K.aside), recalled_groups = recalled,
  aside = bound > 0 and call('ZRANGE', K.aside, 0, bound - 1) or {},
}}
