#!lua flags=no-writes,allow-oom
-- uses: roles
-- What a slice of a batch consists of; changes nothing. ARGV: trainer, train step, first and last group.
-- Returns (group, admission index, members that were scored) in training order; nothing before the cut and past
-- the end. A member is
-- (number, birth version, finish reason, outcome, reward); its tokens are read by the caller.
require_trainer(ARGV[1])
local step = ARGV[2]
if tonumber(step) <= tonumber(call('HGET', K.meta, 'trained_step')) then
  fail('CONFLICT', 'step ' .. step .. ' is already trained; its batch file has the groups')
end
if call('HGET', batch_key(step), 'digest') then
  fail('CONFLICT', 'the batch file of step ' .. step .. ' was confirmed; read it from the checkpoint store')
end
local reply = {}
for _, gid in ipairs(call('LRANGE', batch_groups_key(step), ARGV[3], ARGV[4])) do
  local v, members = call('HMGET', group_key(gid), 'index', 'launched'), {}
  for member = 0, tonumber(v[2]) - 1 do
    local m = call('HMGET', trajectory_key(gid .. '.' .. member), 'state', 'birth', 'finish', 'outcome', 'reward')
    if m[1] == 'scored' then members[#members + 1] = {member, m[2], m[3], m[4], m[5]} end
  end
  reply[#reply + 1] = gid
  reply[#reply + 1] = tonumber(v[1])
  reply[#reply + 1] = members
end
return reply
