#!lua
-- pending | partial | resting -> leased, within the pool of the whole mesh (lib/pool.lua): partial trajectories in the
-- resume order of the run, by default those of the oldest group first, among them those that rested long enough; then
-- pending ones in its start order (lib/places.lua). A partial one of an agent's session stays, with its place in the
-- pool, while another worker session may still hold or return trajectories of that session: one process continues all
-- of them.
-- ARGV: session, nonce, limit, maximum number of pending ones among them.
-- Returns JSON, one object per trajectory; a retry with the same nonce gets the same reply. `since` is the time of the
-- first lease in ms, `plan` the plan of its round in a run with rounds, `prompt` the record of its prompt in a run with a
-- history. All values but `new` are text, which avoids a conversion of numbers at every step.
local session = ARGV[1]
require_session(session)
local before = call('HMGET', session_key(session), 'lease_nonce', 'lease_reply')
if before[1] == ARGV[2] then return before[2] end
if recovering() then return '[]' end
local meta = call('HMGET', K.meta, 'user_paused', 'policy_version', 'launcher_paused')
local desired = call('HMGET', K.desired, 'paused', 'rest_before_step')
if meta[1] == '1' or meta[3] == '1' or desired[1] == '1' then return '[]' end
local free = leasable() - tonumber(call('HGET', K.counts, 'leased') or '0')
local room = math.min(tonumber(ARGV[3]), free)
local most_new = tonumber(ARGV[4] or ARGV[3])
local limits = call('HMGET', K.limits, 'max_attempts', 'has_rounds')
local max_attempts, has_rounds = tonumber(limits[1]), limits[2] == '1'
local birth = tonumber(meta[2] or '0') > 0 and meta[2] or '0'
local now_text = integer(now())
local leased, held, buried = {}, {}, 0
-- A dead letter may delete a whole group; the number per call is limited, the rest wait for the next call.
local max_burials = most_burials()

local function take(id)
  local v = call('HMGET', trajectory_key(id), 'attempts', 'mark', 'tokens', 'birth', 'since', 'incarnation')
  local attempts, tokens, since = '1', v[3] or '0', v[5] or now_text
  if v[1] and (v[2] == tokens or v[2] == '-') then
    local tried = tonumber(v[1])
    if tried >= max_attempts then
      bury(id, 'max_attempts')
      buried = buried + 1
      return false
    end
    attempts = integer(tried + 1)
  end
  local born = v[4] or birth
  call('HSET', trajectory_key(id), 'state', S.leased, 'session', session, 'attempts', attempts, 'mark', tokens,
    'tokens', tokens, 'birth', born, 'since', since)
  held[#held + 1] = id
  leased[#leased + 1] = {
    id = id, attempt = attempts, birth = born, tokens = tokens, new = not v[1], since = since,
    incarnation = v[6] or '0', plan = has_rounds and plan_of(id) or nil, prompt = record_name(id),
  }
  return true
end

local function is_elsewhere(agent)
  local owner = call('HGET', agent_key(agent), 'worker')
  return owner and owner ~= session and (call('ZSCORE', K.sessions, owner) or call('SISMEMBER', K.closing, owner) == 1)
end

local left = 0
local function take_from(queue, most)
  local passed = 0
  while #held + left < most and buried < max_burials do
    local found = call('ZRANGE', queue, passed, passed + most - left - #held - 1)
    if #found == 0 then return end
    local seen = {}
    for _, id in ipairs(found) do
      local agent = queue == K.partial and call('HGET', trajectory_key(id), 'agent')
      if agent and is_elsewhere(agent) then
        passed, left = passed + 1, left + 1
      else
        seen[#seen + 1] = id
        -- A dead letter may open a replacement that precedes the rest of `found`, or drop their group.
        if not take(id) then break end
        if agent then own_agent(session, agent, id) end
      end
    end
    if #seen > 0 then call('ZREM', queue, unpack(seen)) end
  end
end

-- Trajectories that rested under a policy before `rest_before_step` become partial, those of the oldest policy first; as
-- many as a call may lease. Each of them may touch two keys, so a call that wakes one buries at most one.
local MOST_WOKEN = 64
local function wake()
  local before = '(' .. (desired[2] or '0')
  for _, id in ipairs(call('ZRANGEBYSCORE', K.resting, '-inf', before, 'LIMIT', 0, MOST_WOKEN)) do
    call('ZREM', K.resting, id)
    local group, tokens = load_group(group_of(id)), call('HGET', trajectory_key(id), 'tokens')
    if group and tokens then
      call('HSET', trajectory_key(id), 'state', S.partial)
      call('ZADD', K.partial, resume_place(group, tonumber(string.match(id, '%d+$')), tonumber(tokens)), id)
    end
    max_burials = 1
  end
end

if room > 0 then wake() end
take_from(K.partial, room)
take_from(K.pending, math.min(room, #held + left + most_new))
local reply = '[]'
if #held > 0 then
  reply = cjson.encode(leased)
  call('SADD', held_key(session), unpack(held))
  call('HSET', session_key(session), 'lease_nonce', ARGV[2], 'lease_reply', reply)
  count('leased', #held)
  count('leases_total', #held)
end
flush_groups()
flush_counts()
return reply
