#!lua flags=allow-oom
-- Leases finished trajectories without a worker, oldest group first; their scores complete batches, which frees memory.
-- A trajectory without a score after max_attempts of these leases becomes a dead letter. ARGV: session, nonce, limit.
-- Reply as in lease, with the number of attempts to score it.
local session, limit = ARGV[1], tonumber(ARGV[3])
require_session(session)
local before = call('HMGET', session_key(session), 'scoring_nonce', 'scoring_reply')
if before[1] == ARGV[2] then return before[2] end
if recovering() then return '[]' end
local found = call('ZRANGE', K.scoring, 0, limit - 1)
if #found == 0 then return '[]' end
local max_attempts = tonumber(call('HGET', K.limits, 'max_attempts'))
-- A dead letter may delete a whole group; the number per call is limited, the rest wait for the next call.
local MOST_BURIALS = most_burials()
local leased, held, seen, buried = {}, {}, {}, 0
for _, id in ipairs(found) do
  local v = call('HMGET', trajectory_key(id), 'scorings', 'birth', 'tokens', 'since', 'incarnation')
  local tried = tonumber(v[1] or '0')
  if tried < max_attempts then
    call('HSET', trajectory_key(id), 'session', session, 'scorings', tried + 1)
    held[#held + 1] = id
    leased[#leased + 1] = {
      id = id, attempt = integer(tried + 1), birth = v[2], tokens = v[3], new = false, since = v[4] or integer(now()),
      incarnation = v[5] or '0', prompt = record_name(id),
    }
  elseif buried < MOST_BURIALS then
    buried = buried + 1
    count('finished', -1)
    call('HSET', trajectory_key(id), 'attempts', tried)
    bury(id, 'max_attempts to score it')
  else
    break
  end
  seen[#seen + 1] = id
end
call('ZREM', K.scoring, unpack(seen))
local reply = '[]'
if #held > 0 then
  reply = cjson.encode(leased)
  call('SADD', held_key(session), unpack(held))
  call('HSET', session_key(session), 'scoring_nonce', ARGV[2], 'scoring_reply', reply)
end
flush_groups()
flush_counts()
return reply
