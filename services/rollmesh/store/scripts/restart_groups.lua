#!lua flags=allow-oom
-- Drops the tokens of open and ready groups over the staleness bound; the same groups begin again. ARGV: leader, group
-- ids. Returns the number of these groups, and the large ones, which sweep_returning completes.
require_leader(ARGV[1])
refuse_while_recovering('restart')
local begun, unfinished = begin_again({unpack(ARGV, 2)}, R.restarted, false)
count('groups_restarted_total', begun)
flush_counts()
return {begun, unfinished}
