#!lua flags=no-writes,allow-oom
-- Reads a slice of a batch; changes nothing.
-- ARGV: trainer, train step, first and last group, maximum payload of the reply in tokens (of eight bytes).
-- Returns the rows of lib/batch_rows.lua in training order; nothing before the cut and past the end.
require_trainer(ARGV[1])
local step = ARGV[2]
if tonumber(step) <= tonumber(call('HGET', K.meta, 'trained_step')) then
  fail('CONFLICT', 'step ' .. step .. ' is already trained; its batch file has the groups')
end
if call('HGET', batch_key(step), 'digest') then
  fail('CONFLICT', 'the batch file of step ' .. step .. ' was confirmed; read it from the checkpoint store')
end
return batch_rows(call('LRANGE', batch_groups_key(step), ARGV[3], ARGV[4]), tonumber(ARGV[5]))
