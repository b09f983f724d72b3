#!lua flags=allow-oom
-- Step reports of the trainer; bounded, so that they may be written without memory. ARGV: trainer, train step after
-- which all reports are replaced, how many of the newest are kept, then (train step, report) pairs.
require_trainer(ARGV[1])
call('ZREMRANGEBYSCORE', K.reports, '(' .. ARGV[2], '+inf')
if #ARGV > 3 then call('ZADD', K.reports, unpack(ARGV, 4)) end
call('ZREMRANGEBYRANK', K.reports, 0, -tonumber(ARGV[3]) - 1)
return 1
