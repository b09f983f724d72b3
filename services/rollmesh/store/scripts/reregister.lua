#!lua flags=allow-oom
-- Re-registers everything that a worker holds after the server came back. Trajectories that it does not list return to
-- the queue. It keeps a listed trajectory only if the tokens in the queue are the first tokens of the worker's.
-- ARGV: session, worker name and address, then (id, incarnation, tokens, digest of these tokens, '-' when it has fewer)
-- each.
-- Returns (kept, saved tokens) per item.
local session, named = ARGV[1], {}
local recovers = recovering()
if not recovers then
  require_session(session)
else
  -- The session may have been opened in the lost part of the state.
  call('ZADD', K.sessions, now() + ttl_ms(), session)
  call('HSET', session_key(session), 'worker', ARGV[2], 'address', ARGV[3])
  call('SREM', K.closing, session)
end

-- True when the queue has exactly the tokens that the worker reports. The worker read their number before this call: if
-- its session held them throughout, further tokens are its own saves. Field d<n>: see lib/save.lua.
local function agrees(at)
  local stated = tonumber(ARGV[at + 2])
  local v = call('HMGET', trajectory_key(ARGV[at]), 'incarnation', 'tokens', 'session', 'd' .. stated)
  local tokens = tonumber(v[2] or '0')
  local same = (v[1] or '0') == ARGV[at + 1] and (v[4] or ARGV[at + 3]) == ARGV[at + 3]
  return same and ARGV[at + 3] ~= '-' and (tokens == stated or (v[3] == session and tokens > stated))
end

for at = 4, #ARGV, 4 do named[ARGV[at]] = agrees(at) end
for _, id in ipairs(call('SMEMBERS', held_key(session))) do
  if not named[id] then
    call('SREM', held_key(session), id)
    give_back(id, true)
    count('released_by_recovery_total', 1)
  end
end
-- A lease whose reply never arrived is discarded too.
call('HDEL', session_key(session), 'lease_nonce', 'scoring_nonce')
flush_counts()

-- Of those leased while others waited, all may be in a call by now. In a recovery nothing else has been leased since:
-- the pool held all of them, and one that has shrunk in the meantime drops none.
local desired = call('HMGET', K.desired, 'pool_size', 'most_waiting')
local free = tonumber(desired[1] or '0') + tonumber(desired[2] or '0') - tonumber(call('HGET', K.counts, 'leased') or '0')
local taken, reply = 0, {}
local birth = math.max(0, tonumber(call('HGET', K.meta, 'policy_version')))

local function lease_again(id, queue)
  if not recovers and taken >= free then return false end
  if not call('ZSCORE', queue, id) then return false end
  local v = call('HMGET', trajectory_key(id), 'attempts', 'tokens', 'birth')
  local tokens = tonumber(v[2] or '0')
  call('ZREM', queue, id)
  call('HSET', trajectory_key(id), 'state', S.leased, 'session', session, 'tokens', tokens,
    'attempts', math.max(1, tonumber(v[1] or '1')), 'mark', tokens, 'birth', v[3] or birth)
  call('SADD', held_key(session), id)
  taken = taken + 1
  return true
end

local function keep(id)
  local v = call('HMGET', trajectory_key(id), 'state', 'session')
  if v[2] == session then return v[1] == S.leased or v[1] == S.finished end
  if v[1] == S.finished and not v[2] then
    call('ZREM', K.scoring, id)
    call('HSET', trajectory_key(id), 'session', session)
    call('SADD', held_key(session), id)
    return true
  end
  return lease_again(id, v[1] == S.partial and K.partial or v[1] == S.resting and K.resting or K.pending)
end

for at = 4, #ARGV, 4 do
  local id = ARGV[at]
  local kept = named[id] and keep(id)
  if not kept then count('lost_by_recovery_total', 1) end
  local agent = kept and call('HGET', trajectory_key(id), 'agent')
  if agent then own_agent(session, agent, id) end
  reply[#reply + 1] = kept and 1 or 0
  reply[#reply + 1] = kept and tonumber(call('HGET', trajectory_key(id), 'tokens')) or 0
end
call('HINCRBY', K.counts, 'leased', taken)
count('reregistered_total', taken)
flush_counts()
return reply
