#!lua
-- uses: core
-- Saves the state of a trajectory's environment after a turn, replacing the older one.
-- ARGV: session, trajectory id, bytes. Returns 1 when the session holds the trajectory.
local v = call('HMGET', trajectory_key(ARGV[2]), 'session', 'state')
if v[1] ~= ARGV[1] or v[2] ~= S.leased then return 0 end
call('HSET', trajectory_key(ARGV[2]), 'snapshot', ARGV[3], 'has_snapshot', 1)
return 1
