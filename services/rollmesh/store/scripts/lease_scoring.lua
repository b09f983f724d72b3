#!lua flags=allow-oom
-- uses: fence roles
-- Finished trajectories whose worker died, oldest group first; their scores let batches be cut, which frees memory.
-- ARGV: session, nonce, limit. Reply as in lease.
local session = ARGV[1]
require_session(session)
local before = call('HMGET', session_key(session), 'scoring_nonce', 'scoring_reply')
if before[1] == ARGV[2] then return cjson.decode(before[2]) end
if recovering() then return {} end
local found = call('ZPOPMIN', K.scoring, ARGV[3])
if #found == 0 then return found end
local reply = {}
for at = 1, #found, 2 do
  local id = found[at]
  local v = call('HMGET', trajectory_key(id), 'attempts', 'birth', 'tokens', 'since')
  call('HSET', trajectory_key(id), 'session', session)
  call('SADD', held_key(session), id)
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = id, tonumber(v[1]), tonumber(v[2])
  reply[n + 4], reply[n + 5], reply[n + 6] = tonumber(v[3]), 0, tonumber(v[4] or now())
end
call('HSET', session_key(session), 'scoring_nonce', ARGV[2], 'scoring_reply', cjson.encode(reply))
return reply
