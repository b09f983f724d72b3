#!lua flags=no-writes,allow-oom
-- Reads the outcomes that no batch file has, as (group, outcome) pairs. ARGV: trainer, train step of the next file.
-- Before it, the outcomes of all earlier files must have been saved here.
require_trainer(ARGV[1])
local saved = tonumber(call('HGET', K.meta, 'history_step') or '0')
if saved ~= tonumber(ARGV[2]) - 1 then
  fail('CONFLICT', 'the outcomes of batch file ' .. saved .. ' are the newest saved ones; file ' .. ARGV[2] ..
    ' cannot follow')
end
return call('HGETALL', K.outcomes)
