#!lua flags=no-writes,allow-oom
-- Finds the process that has a session of an agent. ARGV: id or name of the session.
-- Returns its address, empty once the process is gone (another may have its address by now), and 1 while a trajectory of
-- the session is held or waits for its next lease; nothing for an unknown session.
local id = call('HGET', agent_key(ARGV[1]), 'id') or ARGV[1]
local v = call('HMGET', agent_key(id), 'address', 'worker')
if not v[1] then return {} end

-- The process may have opened another worker session since.
local function is_there()
  if call('ZSCORE', K.sessions, v[2]) then return true end
  for _, session in ipairs(call('ZRANGE', K.sessions, 0, 499)) do
    if call('HGET', session_key(session), 'address') == v[1] then return true end
  end
  return false
end

return {is_there() and v[1] or '', agent_lives(id) and 1 or 0}
