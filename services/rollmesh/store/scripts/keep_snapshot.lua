#!lua
-- Saves the state of a trajectory's environment after a turn, replacing the older one.
-- ARGV: session, trajectory id, incarnation, bytes, and of a session of an agent its id and its name or an empty text.
-- Returns 1 when the session holds this incarnation. A name belongs to one session in progress: CONFLICT for another one.
local v = call('HMGET', trajectory_key(ARGV[2]), 'session', 'state', 'incarnation', 'agent')
if v[1] ~= ARGV[1] or v[2] ~= S.leased or (v[3] or '0') ~= ARGV[3] then return 0 end
local agent, name = ARGV[5], ARGV[6] or ''
local known = name ~= '' and call('HGET', agent_key(name), 'id')
if known and known ~= agent and v[4] ~= agent and agent_lives(known) then
  fail('CONFLICT', 'another session in progress has the name ' .. name)
end
if agent then
  keep_agent(ARGV[1], ARGV[2], ARGV[4], agent, name)
else
  call('HSET', trajectory_key(ARGV[2]), 'snapshot', ARGV[4], 'has_snapshot', 1)
end
return 1
