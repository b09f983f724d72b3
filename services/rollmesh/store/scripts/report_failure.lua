#!lua flags=allow-oom
-- ARGV: leader, text ('' when the run can go on). A failure counts while its reporter leads.
require_leader(ARGV[1])
call('HSET', K.meta, 'failure', ARGV[2], 'failure_leader', ARGV[1])
return 1
