-- Trajectories that may be leased at once: pool_size, and one more for each that waits between two calls of a generator,
-- up to most_waiting.
local function leasable()
  local desired = call('HMGET', K.desired, 'pool_size', 'most_waiting')
  local waiting = tonumber(call('HGET', K.meta, 'waiting') or '0')
  return tonumber(desired[1] or '0') + math.min(waiting, tonumber(desired[2] or '0'))
end

-- Notes how many trajectories of a worker session wait; K.meta has the sum over all sessions.
local function set_waiting(session, waiting)
  local change = waiting - tonumber(call('HGET', session_key(session), 'waiting') or '0')
  if change == 0 then return end
  call('HINCRBY', session_key(session), 'waiting', change)
  call('HINCRBY', K.meta, 'waiting', change)
end
