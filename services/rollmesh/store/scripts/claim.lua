#!lua flags=no-writes,allow-oom
-- uses: core roles
-- Reads a slice of a batch; changes nothing.
-- ARGV: trainer, train step, first and last group, maximum payload of the reply in tokens (of eight bytes).
-- Returns (group, admission index, scored members, payload) in training order; nothing before the cut and past the end.
-- A member is (number, birth version, finish reason, outcome, reward). The payload is the prompt and the saved segments
-- of each member. A payload over the maximum is omitted, so that no call blocks the server for long: the caller reads it
-- with plain commands.
require_trainer(ARGV[1])
local step = ARGV[2]
if tonumber(step) <= tonumber(call('HGET', K.meta, 'trained_step')) then
  fail('CONFLICT', 'step ' .. step .. ' is already trained; its batch file has the groups')
end
if call('HGET', batch_key(step), 'digest') then
  fail('CONFLICT', 'the batch file of step ' .. step .. ' was confirmed; read it from the checkpoint store')
end
local left = tonumber(ARGV[5])

local function payload_of(gid, members, tokens)
  tokens = tokens + call('STRLEN', prompt_key(gid)) / 8
  if tokens > left then return {} end
  left = left - tokens
  local payload = {call('GET', prompt_key(gid))}
  for at, member in ipairs(members) do
    payload[at + 1] = call('LRANGE', segments_key(gid .. '.' .. member[1]), 0, -1)
  end
  return payload
end

local reply = {}
for _, gid in ipairs(call('LRANGE', batch_groups_key(step), ARGV[3], ARGV[4])) do
  local v, members, tokens = call('HMGET', group_key(gid), 'index', 'launched'), {}, 0
  for member = 0, tonumber(v[2]) - 1 do
    local m = call('HMGET', trajectory_key(gid .. '.' .. member), 'state', 'birth', 'finish', 'outcome', 'reward', 'tokens')
    if m[1] == S.scored then
      members[#members + 1] = {member, m[2], m[3], m[4], m[5]}
      tokens = tokens + tonumber(m[6])
    end
  end
  reply[#reply + 1] = {gid, tonumber(v[1]), members, payload_of(gid, members, tokens)}
end
return reply
