#!lua flags=allow-oom
-- A worker states everything it holds after the server came back; what it does not name goes back.
-- ARGV: session, worker name, then (id, saved tokens) each. Returns (kept, saved tokens) per item.
local session, named = ARGV[1], {}
if not recovering() then
  require_session(session)
else
  -- The session may have been opened in the part that was lost.
  call('ZADD', K.sessions, now() + ttl_ms(), session)
  call('HSET', session_key(session), 'worker', ARGV[2])
  call('SREM', K.closing, session)
end
for at = 3, #ARGV, 2 do named[ARGV[at]] = true end
for _, id in ipairs(call('SMEMBERS', held_key(session))) do
  if not named[id] then
    call('SREM', held_key(session), id)
    give_back(id, true)
    count('released_by_recovery_total', 1)
  end
end
-- The answer to a lease that never arrived is void with it.
call('HDEL', session_key(session), 'lease_nonce', 'scoring_nonce')
flush_counts()

local free = tonumber(call('HGET', K.desired, 'pool_size') or '0') - tonumber(call('HGET', K.counts, 'leased') or '0')
local taken, reply = 0, {}
local birth = math.max(0, tonumber(call('HGET', K.meta, 'policy_version')))

local function lease_again(id, queue, saved)
  if taken >= free then return false end
  local order = call('ZSCORE', queue, id)
  if not order then return false end
  local v = call('HMGET', trajectory_key(id), 'attempts', 'tokens', 'birth')
  local tokens = tonumber(v[2] or '0')
  if tokens > saved then return false end
  call('ZREM', queue, id)
  call('HSET', trajectory_key(id), 'state', 'leased', 'session', session, 'order', order, 'tokens', tokens,
    'attempts', math.max(1, tonumber(v[1] or '1')), 'mark', tokens, 'birth', v[3] or birth)
  call('SADD', held_key(session), id)
  taken = taken + 1
  return true, tokens
end

for at = 3, #ARGV, 2 do
  local id = ARGV[at]
  local v = call('HMGET', trajectory_key(id), 'state', 'session', 'tokens')
  local kept, tokens = false, tonumber(v[3] or '0')
  if v[2] == session then
    kept = v[1] == 'leased' or v[1] == 'finished'
  elseif v[1] == 'finished' and not v[2] and tokens <= tonumber(ARGV[at + 1]) then
    kept = call('ZREM', K.scoring, id) == 1
    call('HSET', trajectory_key(id), 'session', session)
    call('SADD', held_key(session), id)
  else
    kept, tokens = lease_again(id, v[1] == 'partial' and K.partial or K.pending, tonumber(ARGV[at + 1]))
  end
  if not kept then count('lost_by_recovery_total', 1) end
  reply[#reply + 1] = kept and 1 or 0
  reply[#reply + 1] = kept and tokens or 0
end
call('HINCRBY', K.counts, 'leased', taken)
count('reregistered_total', taken)
flush_counts()
return reply
