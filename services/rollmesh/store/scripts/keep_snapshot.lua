#!lua
-- Saves the state of a trajectory's environment after a turn, replacing the older one.
-- ARGV: session, trajectory id, incarnation, bytes. Returns 1 when the session holds this incarnation.
local v = call('HMGET', trajectory_key(ARGV[2]), 'session', 'state', 'incarnation')
if v[1] ~= ARGV[1] or v[2] ~= S.leased or (v[3] or '0') ~= ARGV[3] then return 0 end
call('HSET', trajectory_key(ARGV[2]), 'snapshot', ARGV[4], 'has_snapshot', 1)
return 1
