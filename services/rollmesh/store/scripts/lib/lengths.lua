local function length_bucket(tokens)
  return math.floor(math.log(tokens + 1) / math.log(2) * 4)
end

local function length_decile(tokens)
  local histogram, bucket = call('HGETALL', K.lengths), length_bucket(tokens)
  local below, all = 0, 0
  for at = 1, #histogram, 2 do
    local n = tonumber(histogram[at + 1])
    all = all + n
    if tonumber(histogram[at]) < bucket then below = below + n end
  end
  if all == 0 then return 0 end
  return math.min(9, math.floor(10 * below / all))
end
