#!lua
-- uses: fence group save
-- Partial save. ARGV: session, items, then the items (lib/save.lua). Returns (status, tokens) per item.
check_versions(3, tonumber(ARGV[2]))
local reply, at = {}, 3
for _ = 1, tonumber(ARGV[2]) do
  local status, tokens, fields = save(ARGV[1], at)
  if fields and #fields > 0 then call('HSET', trajectory_key(ARGV[at]), unpack(fields)) end
  reply[#reply + 1] = status
  reply[#reply + 1] = tokens
  at = at + ITEM_HEAD + tonumber(ARGV[at + 7])
end
flush_counts()
return reply
