#!lua flags=no-writes,allow-oom
-- uses: roles
-- What a batch consists of; changes nothing. ARGV: trainer, train step.
-- Returns (group, admission index, members) in training order; nothing before the cut.
require_trainer(ARGV[1])
local step = ARGV[2]
if tonumber(step) <= tonumber(call('HGET', K.meta, 'trained_step')) then
  fail('CONFLICT', 'step ' .. step .. ' is already trained; its batch file has the groups')
end
if call('HGET', batch_key(step), 'digest') then
  fail('CONFLICT', 'the batch file of step ' .. step .. ' was confirmed; read it from the checkpoint store')
end
local reply = {}
for _, gid in ipairs(call('LRANGE', batch_groups_key(step), 0, -1)) do
  local v = call('HMGET', group_key(gid), 'index', 'launched')
  reply[#reply + 1] = gid
  reply[#reply + 1] = tonumber(v[1])
  reply[#reply + 1] = tonumber(v[2])
end
return reply
