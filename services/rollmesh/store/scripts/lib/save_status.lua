-- uses:
local SAVED, DUPLICATE, REFUSED, LOST = 1, 2, 3, 4
