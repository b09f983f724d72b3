#!lua flags=no-writes,allow-oom
-- Reads ready groups of a batch that is not cut yet, in admission order; changes nothing. ARGV: trainer, train step,
-- number of groups, maximum payload of the reply in tokens (of eight bytes), ids of groups that the caller has.
-- Returns the rows of lib/batch_rows.lua; nothing while fewer groups are ready, and after the cut.
require_trainer(ARGV[1])
local step, wanted = tonumber(ARGV[2]), tonumber(ARGV[3])
if step ~= tonumber(call('HGET', K.meta, 'cut_step')) + 1 then return {} end
local known, gids = {}, {}
for at = 5, #ARGV do known[ARGV[at]] = true end
for _, gid in ipairs(call('ZRANGE', K.ready, 0, wanted + #ARGV - 5)) do
  if not known[gid] and #gids < wanted then gids[#gids + 1] = gid end
end
if #gids < wanted then return {} end
return batch_rows(gids, tonumber(ARGV[4]))
