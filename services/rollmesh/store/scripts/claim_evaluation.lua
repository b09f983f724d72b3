#!lua flags=allow-oom
-- Claims the oldest waiting evaluation; a session with a claim gets it again. ARGV: session. Returns its id or ''.
require_session(ARGV[1])
local claims = call('HGETALL', K.evaluation_claims)
for at = 1, #claims, 2 do
  if claims[at + 1] == ARGV[1] then return claims[at] end
end
local found = call('ZPOPMIN', K.evaluation_queue)
if #found == 0 then return '' end
call('HSET', K.evaluation_claims, found[1], ARGV[1])
return found[1]
