#!lua flags=allow-oom
-- Drops the tokens of open and ready groups over the staleness bound; the groups wait for a recall and count neither as
-- open nor as admitted. ARGV: leader, group ids. Returns the number of these groups, and the large ones, which
-- sweep_returning completes.
require_leader(ARGV[1])
refuse_while_recovering('set aside')
local begun, unfinished = begin_again({unpack(ARGV, 2)}, R.set_aside, true)
count('groups_set_aside_total', begun)
flush_counts()
return {begun, unfinished}
