#!lua flags=no-writes,allow-oom
-- Records of the generators that are alive.
local records = {}
for _, id in ipairs(call('ZRANGE', K.generator_expiry, now(), '+inf', 'BYSCORE')) do
  records[#records + 1] = call('HGET', K.generators, id)
end
return records
