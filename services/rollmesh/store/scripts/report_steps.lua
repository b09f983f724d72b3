#!lua flags=allow-oom
-- Writes step reports of the trainer; their size is bounded, so they may be written when memory is short. ARGV: trainer,
-- train step after which all reports are replaced, number of reports to keep, then (train step, report) pairs.
require_trainer(ARGV[1])
call('ZREMRANGEBYSCORE', K.reports, '(' .. ARGV[2], '+inf')
if #ARGV > 3 then call('ZADD', K.reports, unpack(ARGV, 4)) end
call('ZREMRANGEBYRANK', K.reports, 0, -tonumber(ARGV[3]) - 1)
return 1
