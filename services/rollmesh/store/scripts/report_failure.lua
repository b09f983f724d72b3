#!lua flags=allow-oom
-- Records the failure of the run, which counts while its reporter leads. ARGV: leader, text ('' clears it).
require_leader(ARGV[1])
call('HSET', K.meta, 'failure', ARGV[2], 'failure_leader', ARGV[1])
return 1
