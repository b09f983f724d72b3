-- Measured times, as moving averages (MeshView.ready_seconds, ready_updates and update_seconds).
local function average(field, sample, weight)
  local before = tonumber(call('HGET', K.meta, field) or sample)
  call('HSET', K.meta, field, string.format('%.3f', before + weight * (sample - before)))
end

-- Adds the time of a group that ends, since the last pause. A group that began again has none, nor one that a restored
-- server was told of.
local function note_time(group)
  if not group.admitted_at then return end
  local began = math.max(group.admitted_at, tonumber(call('HGET', K.meta, 'resumed_at') or '0'))
  call('HINCRBY', K.meta, 'group_ms', math.max(0, now() - began))
end

-- The time of the groups that were dropped since the last ready one counts for the next ready one: each ready group costs
-- so much time in flight.
local function note_ready_time()
  local times = call('HMGET', K.meta, 'group_ms', 'update_ms')
  if not times[1] then return end
  local spent, weight = tonumber(times[1]), 1 / (2 * tonumber(call('HGET', K.limits, 'groups_per_batch')))
  average('ready_ms', spent, weight)
  local update = tonumber(times[2] or '0')
  if update > 0 then average('ready_updates', math.min(math.floor(spent / update), 1000), weight) end
  call('HDEL', K.meta, 'group_ms')
end

-- Notes the report of a trained batch: its update began when the batch was cut and the policy before it was announced.
-- The next batch may be cut before this one's policy is announced.
local function note_trained()
  local times = call('HMGET', K.meta, 'cut_at', 'announced_at')
  if times[1] then
    call('HSET', K.meta, 'update_began', integer(math.max(tonumber(times[1]), tonumber(times[2] or '0'))))
  end
end

-- Notes the announcement of a policy, which ends an update; that of a rollback has none to end.
local function note_announced()
  local began = call('HGET', K.meta, 'update_began')
  if began then
    average('update_ms', math.max(0, now() - tonumber(began)), 0.25)
    call('HDEL', K.meta, 'update_began')
  end
  call('HSET', K.meta, 'announced_at', integer(now()))
end
