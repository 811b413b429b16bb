"""Every number that decides between kernels, with the measurement that set it.

Times are of an NVIDIA H200 and stand, with what was tried beside them, in ``docs/experiments/``.  *Tall* is the network
90000-90-90-10 at batch 128, *medium* 784-1024-1024-10 at batch 1,024.  What a kernel can hold at most is its own, and
stands beside its entry in :mod:`..kernels`.  ``thresholds.X`` is looked up at each use, so that a test may change one.
"""

# --- SIMT tiles: multiply-adds outside the tensor cores ---

# Tiles of so many tenths of the multiprocessors count as filling the card.  Not measured: follows from a wave that
# lacks a tenth of its blocks losing a tenth of the card, about what a smaller tile loses by reading operands twice.
FILLING_TENTHS = 9

# A larger tile may compute one part in so many more than a smaller one.  Not measured: follows from the operands that a
# tile of half the size reads twice.
TILE_WASTE = 8

# --- products split along k (split-K partials, which a second kernel adds up) ---

# Set with the first lowering: 90,000 by 90 makes one column of tiles, 1 of 132 multiprocessors at batch 128.  The split
# decides in which order sums are made, so it follows the widths alone, and changing it changes bits.
SPLIT_K_LEAST_K = 4096
SPLIT_K_MOST_N = 512

# A step of so many rows that its tiles fill a part of a card leaves the split to evaluations, and multiplies such a
# layer of so many columns on tensor cores; of more where operands have scales, since passes over x make them.
# 87-5919-380 at 2,048 rows in tf32, on an H100: 1,178 µs with the split, 384 without.
UNCUT_LEAST_N = 64
UNCUT_LEAST_N_OF_SCALED = 192

# Columns of the tiles that are to fill a third of a card so; of operands with scales tiles of 128 fill a half, since
# for those passes cost more.  An H100 in tf32: 4631-128-128-5 at 1,024 rows 210 µs a step with the split, 98 without;
# 9-8192-408 at 128 rows, whose 52 tiles are four tenths of a card, 170 and 141: forward 33 and 36, back 109 and 72.
UNCUT_COLUMNS = 16

# True: a layer that is split along k is counted both ways in a step, and is on tensor cores if all launches of the step
# take less so; of fewer columns than tensor cores split inside a kernel where operands are single 16-bit numbers.  An
# H200, µs a step, split and so: 7965-256-309 at 64 rows in bfloat16 78, 42; 218-5174-5174-308 at 64 in tf32 470, 436.
CUT_LAYERS_ARE_COUNTED = True

# True: a last layer that is split along k has a head where that is counted to take less than the split product, a sum,
# the loss and dx.  Not timed on a card.  6144 by 4 at 49 rows on an H100: 15.6 µs for the split product alone.
CUT_LAYERS_HAVE_HEADS = True

# At least so much of k in a part, and at most so many parts of a tile of so many columns.  Not measured: follows from
# two blocks for each of 132 multiprocessors, and from partials that stay a small share of the weight's bytes.
PART_LEAST_K = 256
MOST_PARTS = 256
PART_COLUMNS = 128

# Of split operands: a part for nearly each of 132 multiprocessors, in whole slices of k.  Tall's forward product: 72 µs
# by the sm_80 form, 43.6 µs by warpgroups.
SPLIT_OPERANDS_MOST_PARTS = 128
SPLIT_OPERANDS_SLICE = 64

# Of fewer columns the split kernels' tile of 96 would be padding for the larger part.  Not measured: follows from that.
SPLIT_OPERANDS_LEAST_N = 49

# Blocks of an update whose product splits its operands share the rows of a tile in at most so many parts, each of which
# takes as long as so many slices of 32 rows beside its own.  Not fitted: 4224 by 96 at 4,096 rows makes 66 tiles, which
# took 335 µs of an H100.
SPLIT_MOST_PARTS = 16
SPLIT_PART_SLICES = 4

# --- updates by few rows ---

# Weights of fewer elements stay in the second-level cache, where touching them twice costs little; offsets of more do
# not fit 31 bits.  Tall at batch 1: forward 13 and update 43 µs -> one pass of 47, as a stream since 34 to 38 µs.
FEW_ROWS_LEAST_WEIGHTS = 1 << 18
FEW_ROWS_MOST_WEIGHTS = 1 << 31

# --- tensor cores ---

# Below, multiply-adds have made a product before tensor cores have their operands: splitting a matrix takes a launch of
# 5 to 7 µs, a product of 2**18 weights and 256 rows 3 µs at 40 TFLOP/s.
GEMM_LEAST_WIDTH = 128
GEMM_LEAST_WEIGHTS = 1 << 18
GEMM_LEAST_ROWS = 256

# Where the largest weight is larger, tf32 is made of scaled halves: one product in place of three outweighs passes that
# scale what goes between products.  Medium (2**20 weights) in pairs 99.8 to 104.2 µs, in halves 120.5.
MOST_UNSCALED_WEIGHTS = 1 << 21

# Steps in float32 on sm_90a have operands without scales, of three bfloat16, where so many hundredths of what a step is
# counted at with them are less than what it is with scaled ones.  An H100, with scaled ones and so, in µs:
# 784-512-512-10 at 64 rows 40.9 and 32.9, at 256 74.5 and 45.9, 784-1024-1024-10 at 128 83.0 and 57.3, at 1,024 139 and
# 148, six layers of 512 at 256 213 and 119, five of 192 at 8,192 402 and 283 (docs/experiments/products.md).
UNSCALED_STEP_HUNDREDTHS = 95

# What bounds a product of wgmma for a slice of 64 of k: multiply-adds of 16 bits and bytes of shared memory that a
# multiprocessor does in a clock, by the vendor's tables.  128 by 256 takes 1,024 clocks either way, 64 by 128 384;
# measured times follow it, beside a fixed 3.3 µs.
MULTIPLIED_PER_CLOCK = 2048
SHARED_BYTES_PER_CLOCK = 128

# How much longer slices take where shared memory holds only two, so that one is loaded while the other is multiplied.
# An H100, of three components: 1024 by 1024 at 1,024 rows by 64 by 128 2,150 clocks a slice, 1,540 without this; 512
# by 512 at 8,192 by 128 by 128 4,400 and 3,070.
TWO_STAGES_TENTHS = 14

# True: activations may have tiles of 64 by 192, where their waves take less.  An H100: 6144 by 6144 at 166 rows in
# halves 59.9 -> 42.6 µs, 2048 by 3072 at 512 23.1 -> 16.3; 1500 by 700 at 4,096 in bfloat16, back, 28.6 -> 26.9.
WIDE_TILES_ARE_USED = True

# True: products of one component also have tiles of 128 by 192 and by 128 where those are counted to take less;
# gradients of weights from so many rows on, since one block a multiprocessor leaves memory idle while it multiplies.
# An H200, bfloat16: 1183 by 1183 at 16,384 rows, updates by Adam 194 -> 138 µs each; 721 by 721 at 7,782, back, 27.8 ->
# 23.2; 3813 by 1054 at 1,024 by Adam 60.5 -> 81.5, so it keeps its tiles.
MEDIUM_TILES_ARE_USED, MEDIUM_TILES_LEAST_ROWS = True, 2048

# A block takes so many clocks to finish a tile of activations, and for each column of one of its warpgroups; the latter
# where float32 arrays are written or read beside operands, as with GELU and SiLU.  Fitted to 2,432 launches on an H100:
# 17 to 1,024 columns at 512 to 16,384 rows in all precisions (docs/experiments/products.md).
EPILOGUE_CLOCKS = 1500
EPILOGUE_COLUMN_CLOCKS = 40
EPILOGUE_COLUMN_CLOCKS_OF_FLOATS = 90

# True: activations may have tiles of 64 by 128 that four warpgroups share.  Nine products with SiLU at 4,096 rows in
# bfloat16 on an H100, forward and back: 181 and 187 µs by tiles that two share, 126 and 105 by these.
SHARED_TILES_ARE_USED = True

# --- small batches ---

# True: narrow tiles on tensor cores and tiles of multiply-adds whose warps share k, wherever they are counted to take
# less; in training tensor cores also below the three limits above, from those below on.  784-512-512-10 at 64 rows:
# 98.5 -> 48.6 µs in float32, 28.2 in bfloat16.
NARROW_TILES_ARE_USED = True

# Of fewer rows a step is left to multiply-adds.  Not measured: most of the 64 rows of a product of wgmma would be
# padding.
NARROW_LEAST_ROWS = 16

# True: which layers of a step are on tensor cores follows from the clocks of all its launches, whatever the widths, and
# so does whether a step goes by blocks of rows instead.  False: each layer by itself, from the limits below on.
LAYERS_ARE_COUNTED_TOGETHER = True

# There tensor cores are counted at so many tenths: those counts have every pass.
LAYERS_TENTHS = 11

# The limits that hold where layers are not counted together.
NARROW_LEAST_WIDTH = 64
NARROW_LEAST_WEIGHTS = 1 << 16

# What a launch takes beside its slices, 3.3 µs from its start to its last store (docs/experiments/products.md).
LAUNCH_CLOCKS = 6400

# How much longer a launch takes that does not begin while the one before ends, as products of multiply-adds do not.  By
# 128 and six layers of 256 at 256 rows: 19 launches on plain cores 91.8 µs, 21 with tensor cores, of which 17 begin so,
# 72.0, where counts without this give 107 and 106.
LATE_LAUNCH_CLOCKS = 1600

# A head's wave of blocks, of 8 rows each, and half a clock for each weight.  Without the launch: 1024 by 10 at 1,024
# rows 5.7 µs, 2048 by 11 at 256 rows 9.4, 512 by 10 at 256 rows 3.7, 102 by 2 at 2,048 rows 3.4.
HEAD_WAVE_CLOCKS = 6500

# What blocks of column heads take.  Of 8 rows: the first for each wave of them, two on a multiprocessor, and a clock
# for each weight that a multiprocessor passes, half of it for dx.  Of 2 rows, which are one wave: the second, so many
# hundredths of a clock for each weight for the logits and as many for dx, and W from the second-level cache.  By the
# table in docs/experiments/losses-and-heads.md, µs less 2 for the launch, and counted so: 1024 by 10 at 8,192 rows 57
# and 60; 1500 by 10 at 4,096 41 and 40; 64 by 1 at 16,384 37 and 38; 2048 by 11 at 256 11 and 12; of blocks of two
# 2048 by 11 at 2 rows 5.5 and 5.3, 512 by 10 at 256 5.4 and 4.9, 2048 by 32 at 16 9.8 and 11.5.
COLUMN_HEAD_WAVE_CLOCKS = 9000
FEW_ROWS_HEAD_CLOCKS = 6500
FEW_ROWS_HEAD_HUNDREDTHS = 15

# What a layer that is split along k takes beside its product: a wave of the blocks that add partial sums up; dx, of
# which tiles of multiply-adds move so many bytes in a clock, with those that its slope needs, if columns are few; and
# a product of few rows.  4096 by 10 at 4,096 rows on an H100: sums 12 µs, which are two waves; dx 107 µs, 134 MB.  The
# product of few rows is not measured: follows from loads that wait one for another.
PARTIALS_WAVE_CLOCKS = 6000
PLAIN_INPUT_BYTES_PER_CLOCK = 640
FEW_ROWS_FORWARD_CLOCKS = 2000

# What a loss takes that a launch of its own computes.  The last layer on tensor cores beside a head, in a step: 333 by
# 10 at 600 rows in bfloat16 2.3 µs longer, 1024 by 10 at 1,024 rows 2.4; 128 by 10 at 8,192 rows 6.9 less.
LOSS_CLOCKS = 4000

# And for each row that a team takes after another one.  An H100: 55 columns at 15,742 rows, five rows each, 12.2 µs.
LOSS_ROW_CLOCKS = 2000

# True: few rows, long rows and small weights have heads of their own.  2048 by 11 at 2 rows: 16.6 -> 7.45 µs; 1111 by 1
# at 2 rows: 10.25 -> 5.2; 102 by 2 at 2,048: 11.6 -> 6.7; 2048 by 32 at 16: 60.3 -> 11.8.
COLUMN_HEADS_ARE_USED = True

# Of more rows than the first for each multiprocessor, blocks share W among 8.  Of more weights than the second the head
# that keeps x in registers reads shared memory less; of it a multiprocessor has one block at a time, of others two, so
# it is for one wave of blocks: 1024 by 10 at 1,024 rows in bfloat16 9.0 µs by it, 11.6 by columns, at 8,192 rows 64.5
# and 58.8; 300 by 10 at 700: 9.0 and 7.9.
FEW_ROWS_HEAD_ROWS = 2
COLUMN_HEAD_MOST_WEIGHTS = 4096

# Of so many weights that head is also for few rows, if rows times weights are more than these: each block of two rows
# reads all of W, which blocks of eight do a quarter as often.  1024 by 10 at 128 rows: 7.46 µs, 8.26 by blocks of
# two; 512 by 10 at 256 rows: 7.02 and 7.40.  Both are 1.3 million.  The limit itself is not measured: follows from
# 5.5 TB/s of the second-level cache, by which blocks of two read W in 1.0 to 1.4 µs there, and in 0.3 to 0.5 at the
# limit.
FEW_ROWS_HEAD_READS = 1 << 18

# True: up to so many rows the blocks of a cluster of 8 share k of a last layer with so many weights: each reads an
# eighth of W for the logits, and the blocks add up what they have, which takes so many clocks.  On an H200: 6191 by 6
# at 16 rows 12.1 -> 7.4 µs, 2048 by 29 at 4 10.7 -> 7.7, 4096 by 5 at 7 7.8 -> 6.9; 2048 by 4 at 4 5.9 -> 6.4, and 512
# by 32 at 32, whose clusters are not all on the card at once, 7.4 -> 11.6.
CLUSTER_HEADS_ARE_USED = True
CLUSTER_HEAD_MOST_ROWS, CLUSTER_HEAD_LEAST_WEIGHTS, CLUSTER_HEAD_CLOCKS = 16, 1 << 14, 1000

# True: of more rows than one wave of blocks by columns has, and W of at most 8 columns that fits into shared memory, a
# warp has two rows at a time and waits for no other, where that is counted to take less.  On an H200, with a dropout:
# 64 by 1 at 16,384 rows 39.4 -> 17.3 µs, 768 by 1 at 8,192 34.7 -> 24.0; 1024 by 2 at 2,586 15.9 -> 22.7, since few
# warps have many parts of rows in turn.  Fitted to 16 such heads: clocks of a wave, and of each number of a row behind
# the first part; and tenths of a clock of a multiprocessor for each number of k that a block has, and each weight.
ROW_HEADS_ARE_USED = True
ROW_HEAD_WAVE_CLOCKS, ROW_HEAD_LONG_ROW_CLOCKS = 14_500, 24
ROW_HEAD_NUMBER_TENTHS, ROW_HEAD_WEIGHT_TENTHS = 65, 23

# A block makes at least so much of k in dx where several have the same rows: two vectors for each lane of a warp.  Not
# measured.
HEAD_PART_LEAST_K = 256

# A step by blocks of rows takes so many clocks for each wave of blocks, and one for each weight: by what remains of
# 50-128-128-128-1 at 1,024 and 8,192 rows and of 20-64-64-2 at 8,192, measured below, without launches and updates.
ROW_STEP_WAVE_CLOCKS = 12_000

# What a slice of 64 rows of a weight's gradient takes beside what bounds other products: neither operand lies along the
# rows.  Without a launch's 5 µs: 256 by 256 at 8,192 rows in bfloat16 31 µs, 256 clocks a slice counted and 470 taken;
# 512 by 512 at 2,048 rows in tf32 12 µs, 640 and 730; 1024 by 1024 at 1,024 rows in tf32 12 µs, 1,152 and 1,400.
GRADIENT_SLICE_CLOCKS = 200

# Products of a weight's gradient that also sum a bias's gradient wait for the warps that do: for a slice of 64 rows so
# long, and for each row that a warp takes of it (sum_columns of cuda/gemm/gemm_sm90.cuh).  Bfloat16: 271 by 296 at
# 2,048 rows, of which a warp takes 5 of each slice, 15.2 µs.
SUMMED_SLICE_CLOCKS = 300
SUMMED_ROW_CLOCKS = 60

# True: several blocks, whose memory one cluster shares, have parts of the rows of a weight's gradient on tensor cores,
# wherever that is counted to take less.  256 by 256 at 8,192 rows in bfloat16 31 µs, of which 6 for the bias's
# gradient, by clusters of eight 12; 300 by 300 at 4,096 in tf32 36 and 15.5; 128 by 768 at 16,384 in bfloat16 40, 22.
CLUSTERS_SHARE_ROWS = True

# What a block of such a cluster takes at least for a slice of 64 rows, by the components of an operand; beside the rows
# that a warp sums; for each block whose sums another one reads; and longer than other tiles for its launch.  Bfloat16
# by one block a tile: 256 by 256 at 8,192 rows 36 µs, 128 by 768 at 16,384 rows 102, 768 by 128 at 16,384 69, where a
# warp sums 6, 11 and 6 rows of a slice.  784-512-512-10 at 256 rows in bfloat16 33.9 µs a step, by clusters of two
# 36.7.
# Of three components 192 by 192 at 8,192 rows takes 1,240 a slice by clusters of eight, 512 by 192 1,380 by four.
CLUSTER_SLICE_CLOCKS = {1: 430, 2: 850, 3: 1300}
CLUSTER_SUMMED_CLOCKS = 100

# The same of large tiles, 128 by 128: of a slice, and of each block whose sums another one reads.  An H100, by the
# tiles that are chosen without them and by these: 721 by 721 at 7,782 rows in bfloat16 by Momentum 57 and 35 µs, 512 by
# 512 at 8,192 22 and 19; in tf32 by Adam 1002 by 627 at 8,192 97 and 71, 339 by 766 at 3,351 29.5 and 23.1; but 295 by
# 384 at 4,096 by clusters of eight 16.8 and 19.8.
LARGE_CLUSTER_SLICE_CLOCKS = {1: 850, 2: 1700}
LARGE_CLUSTER_BLOCK_CLOCKS = 900
CLUSTER_BLOCK_CLOCKS = 300
CLUSTER_CLOCKS = 5000

# True: in a step such clusters also share k of products that make activations, wherever that is counted to take less,
# but where a loss ends the product.  Without them few rows and few columns have tiles of 64 by 16, each of which takes
# its slices of k one after another: 8192 by 408 at 128 rows in tf32 takes 36 µs on an H100 so, and 17 by clusters.
CLUSTERS_SHARE_K = True

# What such a product takes beside its slices and what blocks read of each other.  What a slice takes at least, by the
# components of an operand.  And by how many tenths that is more than the second-level cache takes for the slices of all
# blocks: of two components a block has fewer slices in flight.  Fitted to 66 launches on an H100 that have no more
# blocks than multiprocessors: 2048 by 512 at 100 rows in float32 12.4 -> 10.6 µs, 6144 by 768 at 49 in bfloat16 15.4 ->
# 8.3, 3072 by 512 at 512 in tf32 15.1 -> 11.8; but 1024 by 1024 at 128 in tf32, which keeps tiles of 64 by 16, 9.1 and
# 9.6.  Of 52 launches with more blocks 50 took no less time than other tiles, so no product has more.
CLUSTER_PRODUCT_CLOCKS = 2000
CLUSTER_PRODUCT_SLICE_CLOCKS = {1: 300, 2: 850, 3: 800}
CLUSTER_PRODUCT_CACHE_TENTHS = {1: 10, 2: 15, 3: 15}

# Bytes of slices that a multiprocessor has from the second-level cache in a clock while all load some.  512 by 512 at
# 2,048 rows in tf32 by 64, 128 and 256 blocks: a slice of 32 KiB takes 810, 1,100 and 2,200 clocks.
CACHE_BYTES_PER_CLOCK = 29

# How much longer other tiles take to move a wave of tiles of a weight whose rows are no vectors.  300-700-333-10 at 600
# rows in bfloat16: 57.6 µs, 50.8 by clusters of two.
SCALAR_TILE_CLOCKS = 5000

# From so many weights on blocks that are several on a multiprocessor may multiply while others move their tiles: memory
# then gives so many bytes in a clock, the second number where they do not.  A weight and its slot are read and written.
CLUSTER_LEAST_WEIGHTS = 1_000_000
CLUSTER_WEIGHT_BYTES = 16
CLUSTER_BYTES_PER_CLOCK = 1540, 1130

# Of fewer weights than the second number that gains only where rows are no vectors, where all those blocks are there at
# once, or where a weight fills less than so many hundredths of the waves of tiles of usual size.  An H100, by usual
# tiles and so: 1024 by 1024 at 64 rows in bfloat16 by Adam 15.4 and 12.0 µs, 1536 by 1536 29.5 and 21.6, 8192 by 408
# 46.4 and 37.6, 2049 by 2049 73.4 and 62.6; but 2048 by 1000, which fills two waves of 64 by 128, 29.0 and 32.6.
CLUSTER_FILLED_HUNDREDTHS = 92
CLUSTER_MANY_WEIGHTS = 1 << 23

# True: those blocks have tiles of 64 by 128 where that is more than one wave of them.  An H200, by tiles of 64 by 64
# and so: 6144 by 6144 at 128 rows in bfloat16 204 and 195 µs, 768 by 3072 at 64 29 and 30; 768 by 1536, one wave, 7.5
# and 8.3.
WIDE_CLUSTERS_ARE_USED = True

# True: where that is counted at more than so many tenths of what it takes with a launch of its own, another kernel sums
# the bias's gradient.
COLUMNS_MAY_BE_SUMMED_APART = True
SUMMED_TENTHS = 15

# Weights that make too few tiles to fill the card move by tiles whose warps share the rows, where these are counted to
# take less, from so many rows on; of fewer most of those warps would have none.  Not measured: follows from that.
WARP_SPLIT_LEAST_ROWS = 32

# For 256 rows a block of such a tile takes so many clocks, and one of the update without tiles, of which a
# multiprocessor has one at a time, for 512 rows.  50-128-128-128-1 at 1,024, 2,048 and 8,192 rows: 57.5, 105 and 408 µs
# without tiles, 42.3, 77.7 and 297 by tiles; 20-64-64-2: 32.7 and 131 at 1,024 and 8,192 without, 34.4 and 171 by
# tiles; seven weights of 256 by 256 at 256 rows: 155 and 91.8.
WARP_SPLIT_WEIGHT_CLOCKS = 5800
SMALL_N_CLOCKS = 7000

# Updates of at most 16 columns give a thread a row of W up to so many rows of the batch, whose dz lies in shared memory
# at once; each 16 rows take so many clocks, a load's latency and their multiply-adds.  An H100 under ncu without tiles:
# 6,144 × 4 weights at 49 rows 22.6 µs, 1,536 × 7 at 16 rows 11, 768 × 2 at 4 rows 6.5.
# A step of 10-768-6144-4 at 49 rows: 151 µs without this, 135 with it.  FEW_COLUMNS_CLOCKS is counted, not measured.
FEW_COLUMNS_MOST_ROWS = 64
FEW_COLUMNS_CLOCKS = 1200

# Gradients of at most 16 columns, moved or stored, have tiles whose warps share the rows where these, counted at so
# many tenths, take less than the kernel without tiles.  Not measured: follows from counts, by which 4096 by 10 at 4,096
# rows takes 115 µs without tiles, by four waves of blocks, and 48 by such tiles.
FEW_COLUMNS_TILE_TENTHS = 15

# True: gradients of at most 16 columns that are stored for a later update are made as updates are, where that is
# counted to take less than a tile of multiply-adds.  4096 by 10 at 4,096 rows by 32 by 32 on an H100: 390 µs.
SMALL_N_GRADIENTS_ARE_USED = True

# True: where it is counted to take less, several blocks have a tile of a weight, each a part of the rows, whose sums
# the last one adds up.  What that takes beside the slices: a store, a fence and a count of blocks, and loads that wait
# for them, some 1,000 clocks of latency each, and half as much again.  Behind a step by blocks of rows, on an H100:
# 12-256-1 at 3,653 rows 70.9 -> 52.4 µs, 20-64-64-2 at 8,192 132 -> 81.
UPDATES_HAVE_PARTS = True
ADDED_PARTS_CLOCKS = 6000

# True: a step's forward product over at most 16 terms has tiles whose part of W lies in registers, where they fill the
# card.  A block's first loads; of each row of a tile, what each term and the epilogue take, by the instructions of its
# four warps' columns.
SHORT_TILES_ARE_USED = True
SHORT_CLOCKS, SHORT_ROW_CLOCKS, SHORT_TERM_TENTHS = 2500, 25, 13

# True: a weight of at most 8 columns or 16 rows is moved strip by strip where that is counted to take less by more than
# half a launch, since strips are not moved with other layers' tiles, and in no more parts than leave room for other
# launches: 23-4096-3 at 1,024 rows in float32 takes 92 µs with 256 blocks of them, 82 with 128.  So many clocks of a
# block; for some rows of the batch by each of eight warps, which wait for memory once; for each four parts, for which
# the last block waits once, and for each element of its threads more; and bytes that memory gives a clock.  Fitted to
# 26 updates of few columns and four of few rows on an H200.
STRIPS_ARE_USED = True
STRIP_CLOCKS, STRIP_ROWS_CLOCKS, STRIP_BYTES_PER_CLOCK = 3000, 1850, 2600
STRIP_SUMS_CLOCKS, STRIP_SUM_CLOCKS = 400, 120

# True: in a step launch by launch the updates of small weights that are of one kind are one launch, behind the last one
# that makes a delta of theirs.  Where blocks have parts of the rows, all layers' blocks are one wave: in as many parts
# as each layer has alone, 620 blocks of 242-28-28-28-28-28-55 at 15,742 rows took 44.3 µs, 132 take 25.8.  Which layers
# are on tensor cores, and whether a step goes by blocks of rows, is counted without it.  48-84-21-36-95-187 at 4,371
# rows on an H100: four updates of 12.5, 9.4, 9.6 and 11.1 µs, in one launch 23.9, a step 168 -> 148;
# 132-21-71-28-223-202-56-274 at 8,192 rows: 16.8, 11.2, 10.8 and 14, in one 36.1, a step 381 -> 363.
UPDATES_ARE_GROUPED = True

# True: updates on tensor cores, of operands without scales, are one launch as well, behind the last delta, wherever
# that is counted to take less: by the tiles of clusters, of which those of all layers are one grid.  Larger weights
# have launches of their own: the three largest of 2869-7405-7405-7405-7405-38 at 128 rows in float32 take 3 % longer
# so.  A block takes so many clocks beside its slices and bytes, by how many share a multiprocessor, and more if it has
# others in its cluster; of a weight so many bytes are moved, with its slots and operands; a block that waits for each
# slice takes so many tenths of what the cache gives longer where the card is full, and one that has its rows alone so
# many tenths of a slice.  Fitted to 133 launches on an H200; by their fastest 14 steps take 0.67 to 1.0 of the time.
TENSOR_UPDATES_ARE_GROUPED = True
GROUPED_MOST_WEIGHTS = 1 << 25
GROUPED_MOST_LAYERS = 16  # each block goes through all of them to find its own
GROUPED_BLOCK_CLOCKS, GROUPED_CLUSTER_CLOCKS = {1: 10000, 2: 2500, 3: 2000}, 1000
GROUPED_WAITING_TENTHS, GROUPED_ALONE_TENTHS = 3, 15
MOVED_BYTES = 20
GROUPED_CACHED_BYTES = 48 << 20  # of operands, or of a weight, that the second-level cache holds
MEMORY_BYTES_PER_CLOCK = 17  # of a multiprocessor, where it does not

# More blocks are worth it where they are counted to take so many hundredths of the time, or less.
GROUPED_HUNDREDTHS = 95

# True: of a step on one stream, updates whose blocks take at most so many tenths of the card run beside the launches
# that follow them; those on tensor cores where each block has at least so many rows of the batch.  An H100: of 46
# networks steps of 25 take 0.80 to 0.98 of the time; 132-21-71-28-223-202-56-274 at 8,192 rows 336 -> 308 µs,
# 58-44-92-506 at 16,384 in bfloat16 167 -> 140, 784-512-512-10 at 64 51.6 -> 42.2, 5-4096-2 at 4 16.8 -> 13.5.  With
# fewer rows a block 885-192-324-34-112-196-142 at 1,024 takes 78 µs for 70, 784-512-512-10 at 256 in bfloat16 35, 33.
UPDATES_RUN_BESIDE = True
BESIDE_LEAST_ROWS = 512
BESIDE_TENTHS = 7

# True: by the count below one tile of multiply-adds is chosen before another for any number of rows.  256 by 159 at
# 8,192 rows by 32 by 32, since wider ones are padded by more than an eighth: 58 µs, counted 64, and 27 by 128 by 96;
# 904 by 59 at 2,048: 33 µs, counted 40, and 11 where warps share k.
TILES_ARE_COUNTED = True

# Of more rows tiles whose warps share k are counted at so many tenths beside others, of which the count below is too
# high: their blocks multiply while they wait.  Where tiles are not counted, no such product has them.  Not measured:
# follows from that.
WARP_SPLIT_MOST_ROWS = 512
MANY_ROWS_TENTHS = 15

# How long a block of multiply-adds waits for a slice of k beside multiplying it, and multiply-adds that a
# multiprocessor does in a clock, of 128.  784-512-512-10 at 64 rows takes 114 µs, of which 80 are left for 113 slices
# of 16, at 1.95 GHz; 784-1024-1024-10 at 128 rows gives the same.  cuBLAS reaches 51 of 67 TFLOP/s.
SLICE_CLOCKS = 1200
FUSED_PER_CLOCK = 96

# A block of a tile whose warps share k has a multiprocessor to itself: each wave after the first begins anew, and adds
# the warps' sums up.  Seven more waves of 71 by 3072 at 141 rows on an H100: 14.3 µs, counted 8.7 without this.
WARP_SPLIT_WAVE_CLOCKS = 1400

# True: a step's forward product of few tiles whose warps share k may have several blocks for each of them, with parts
# of k, which another launch adds up, where that is counted to take less.  An H100: 3072 by 38 at 141 rows, 25 blocks,
# 29.3 µs and 6.5 + 2.3 by 180; 2000 by 64 at 48 23.0 and 4.7 + 2.4; 2048 by 100 at 128 15.3 and 6.5 + 2.5.
STEPS_ARE_CUT = True

# A pass that splits an operand of a small batch: 784-512-512-10 at 256 rows takes 76.5 µs, of which six passes.
SPLIT_PASS_CLOCKS = 12_000

# What passes over a head's x take longer, in clocks for a thousand numbers: 2000 by 10 at 4,096 rows in float32 takes
# 71 µs longer on tensor cores than a head.
SPLIT_THOUSAND_CLOCKS = 16

# A kernel for small batches is counted at so many tenths beside another one: counts of steps of 64 to 512 rows err by
# up to 10 %, and by more where weights leave the second-level cache (docs/experiments/small-batches.md).
COUNTED_TENTHS = 12

# True: few rows and a large weight are multiplied by blocks that keep the whole batch and pass over W once.  Four
# weights of 1536 by 1536 at 16 rows by Adam: 355 -> 151 µs a step; three of 563 by 563 at 8 rows: 80 -> 59; two of 6144
# by 6144 at 4 rows: 1,784 -> 814; 2738-4096-4096-8 at 32 rows in tf32: 394 -> 356, in bfloat16 320 -> 357.
WHOLE_BATCH_IS_USED = True

# True: where columns make blocks for at most half the card, those of a cluster share k in a forward product.  1536 by
# 335 at 32 rows, 21 blocks: 14 µs, and 7.5 by clusters of four (an H100, the first under ncu).
WHOLE_BATCH_MAY_SPLIT = True

# A block of the forward pass has more columns where that leaves blocks for so many hundredths of the multiprocessors.
# An H100, 4 rows: 6144 by 3072 by 96 blocks of 32 columns 33.1 µs, by 192 of 16 39.8; 4096 by 2048 by 64 of 32 19.2,
# by 128 of 16 17.2; 5120 by 6144 by 96 of 64 49.0, by 192 of 32 55.7.
WHOLE_BATCH_FILLED_HUNDREDTHS = 55

# Up to so many rows 32 columns take the place of 16 where clusters that share k leave blocks for as many, and each warp
# so many slices.  An H200, 4 rows: 6144 by 1536 by 96 blocks of 16 columns 11.3 µs, by 48 clusters of two with 32 9.8;
# 2048 by 2048, of which a warp has 8 slices, 5.8 and 5.9.
WHOLE_BATCH_WIDE_SPLIT_ROWS, WHOLE_BATCH_WIDE_SPLIT_SLICES = 8, 12

# True: of few rows a weight whose dx nobody reads is moved as a flat array, of more rows than these only where its rows
# are no vectors.  An H200, a launch by its rows and so: 3073 by 6161 at one row by Adam 145, 113 µs; 121 by 2326 at two
# by Momentum 5.8, 3.5; 158 by 1893 at 4 by Adam 8.9, 7.4; 3779 by 6144 at 4 by Momentum 104, 103, but its step 641,
# 660.
OUTER_PRODUCTS_ARE_USED = True
OUTER_PRODUCTS_ROWS = 2

# Smaller weights stay with kernels of tiles: of fewer than NARROW_LEAST_ROWS rows, and of more.  An H200, µs a step,
# with 2^14 for both and with 2^10: 6895-256-48-192-384-155 at 9 rows in bfloat16 72.8, 59.1; 7000-2048-64-64-100-155 at
# 2 in float32 137.2, 119.3; 2048-1024-64-100-192-10 at 9 in bfloat16 58.2, 48.0; but 7000-2048-32-100-60 at 32 in
# bfloat16 177.2, 183.4.
WHOLE_BATCH_LEAST_WEIGHTS = 1 << 10
WHOLE_BATCH_LEAST_WEIGHTS_OF_MORE = 1 << 14

# So few rows keep the batch in layers of at most so long k as well, which steps split along k else, if no head makes
# their outputs and no tail follows.  An H100: 188-6144-114 at one row in bfloat16 54.8 -> 34.2 µs a step, 9-8192-408 at
# 4 in tf32 107.8 -> 45.5.
CUT_ROWS, CUT_MOST_K = 16, 16384

# Of more rows than these, weights from these sizes on are on tensor cores where an operand is a single 16-bit number:
# multiply-adds would take longer than memory.  At 32 rows 2738-4096-4096-8 in bfloat16: 354 -> 317 µs by tensor cores,
# in tf32, whose operands are scaled, 356 -> 394; 2738-7901-7901-8 in tf32: 1,443 -> 1,212, with its first layer alone
# on multiply-adds 1,331.
WHOLE_BATCH_ROWS_OF_SINGLES = 16
WHOLE_BATCH_MOST_WEIGHTS_OF_SINGLES = 1 << 22
WHOLE_BATCH_MOST_WEIGHTS_OF_SCALED = 20 << 20

# Passes over W on tensor cores: between so many rows, and for weights from these sizes on, of FEW_ROWS and of more.  An
# H100, µs a step, without and with them: 2085-1024-1024-882 at 19 rows in float32 96.5, 82.7; 1000-1300-1300-200 at 24
# in tf32 99, 84; 39-6144-1536-1536-3072-6144-31 at 32 in bfloat16 442, 383; 1788-768-384-2048-512-326 at 39 94, 122.
# Of more than 32 rows tiles have less to do where no launch makes operands with scales.  An H200, with such passes and
# by tiles: 218-5174-5174-308 at 64 rows in tf32 437, 352; 4416-4096-2048-6144-413 at 64 in float32 648, 604; but
# 65-2048x6-149 at 64 in tf32, whose operands are halves with scales, 395, 450.
TENSOR_WHOLE_BATCH_IS_USED = True
TENSOR_WHOLE_BATCH_LEAST_ROWS = 17
TENSOR_WHOLE_BATCH_MOST_ROWS = {False: 32, True: 64}  # by whether operands of tiles have scales
TENSOR_WHOLE_BATCH_FEW_ROWS = 32
TENSOR_WHOLE_BATCH_LEAST_WEIGHTS = 3 << 18
TENSOR_WHOLE_BATCH_LEAST_WEIGHTS_OF_MORE = 3 << 19

# Clocks of one slice of W's rows of such a forward pass, and of one chunk of its columns of the backward pass, by rows
# of a block and components; a block takes two more for what it does once.  Fitted on those steps.
TENSOR_WHOLE_BATCH_SLICE_CLOCKS = {(32, 1): 2200, (32, 2): 2800, (32, 3): 3300, (64, 2): 3700, (64, 3): 4800}
TENSOR_WHOLE_BATCH_CHUNK_CLOCKS = {(32, 1): 5200, (32, 2): 5400, (32, 3): 5400, (64, 2): 6000, (64, 3): 6800}

# True: of NARROW_LEAST_ROWS rows or more, blocks that keep the whole batch pass over a layer only where that is counted
# to take less than tiles on tensor cores, of formats without scales.  An H200, µs a step, so and by tiles:
# 50-512-309-105-307-1112-9 at 20 rows in float32 82.8, 56.7; 782-279-1082-1643-544-439-25 at 32 in bfloat16 125.5,
# 63.1; 133-1536-335 at 32 in tf32 34.2, 26.1; but 2879-512x6-198 at 16 in float32 82.5, 89.5.
WHOLE_BATCHES_ARE_COUNTED = True

# Clocks of such blocks on plain cores, by whether there are more than 16 rows: of a row of W forward, in tenths, and
# how much longer it takes where rows of W are no vectors; of a chunk of columns back, where they are vectors and where
# not; and of a block forward and back, what it does once.  Fitted on 62 layers of those steps.
WHOLE_BATCH_ROW_TENTHS = {False: (45, 30), True: (100, 90)}
WHOLE_BATCH_CHUNK_CLOCKS = {False: (1700, 3500), True: (3200, 4700)}
WHOLE_BATCH_BLOCK_CLOCKS = 1200, 500
# Of so few rows one launch makes operands of more steps' inputs: 0.6 to 0.8 µs a step on an H200, counted at 3 else.
STAGED_PASSES_OF_FEW_ROWS = 3
PASSED_BYTES, PASSED_WITHOUT_VECTORS = 24, 1.6  # of a weight, by both; how much longer where rows are no vectors

# --- losses, outputs ---

# A row of so many columns is taken by a block of 1,024 threads, of fewer by a warp.  272,000 columns: loss 1.37 -> 0.05
# ms, output 1.25 -> 0.04 ms.  The order of a row's sums follows from this, so changing it changes bits.
WIDE_ROW_LEAST_N = 16384

# A loss has at most so many blocks for each multiprocessor, as many as are on it at once: of more rows each goes
# through several before it waits for the sums of all others.  The order of the sums follows from it.  16,384 rows of
# 506 logits on an H100: 40.6 µs by 2,048 blocks, 30.8 so, with targets that are read once a row.
LOSS_BLOCKS = 3

# A tail takes a block for each row; beyond so many rows, two waves of blocks on 132 multiprocessors, products share the
# weights better.  Tall: 25 -> 14.7 µs at batch 128, six launches of 20 -> 13.1 µs at batch 1.
TAIL_MOST_ROWS = 256

# --- blocks of rows: forward, loss and deltas of a network whose weights one multiprocessor holds, in one launch ---

# 50-128-128-128-1 at 1,024 rows: 82.3 µs launch by launch, 42.3 so; at 8,192 rows 412 and 297.
ROW_STEP_IS_USED = True

# The same on tensor cores, with blocks of so many rows at a time.  182-63-63-63-63-29 at 5,760 rows in float32 205 and
# 103 µs, 4-96-96-96-96-8 at 16,384 in tf32 235 and 125, 242-28-28-28-28-28-55 at 15,742 in bfloat16 166 and 59, on an
# H100.
TENSOR_ROW_STEP_IS_USED = True
TENSOR_ROW_STEP_LEAST_ROWS = 256
TENSOR_ROW_STEP_TILES = (16, 32, 48, 64, 96, 128)

# Its clocks, fitted on 146 steps of 33 networks on an H100, of which 90 % are off by at most 17 %: once
# for a step, launches and update included; for each block's rows; for each of their products; for 8 columns of 16 rows
# of one that a warp multiplies over 16 terms, ends, or computes an activation of that is not cheap; for a row.  And so
# many inputs of a block's rows, and bytes of all blocks' gradients, are moved in a clock; fewer where these do not stay
# in the second-level cache: 104-177-145-416-148-98-2 at 4,096 rows in bfloat16, which leaves 96 MB, takes 129 µs so and
# 102 launch by launch, where 102 were counted.
TENSOR_ROW_STEP_CLOCKS = 15_400
TENSOR_ROW_STEP_TILE_CLOCKS = 2_900
TENSOR_ROW_STEP_PRODUCT_CLOCKS = 1_720
TENSOR_ROW_STEP_MULTIPLY_CLOCKS = 42
TENSOR_ROW_STEP_END_CLOCKS = 450
TENSOR_ROW_STEP_COSTLY_CLOCKS = 860
CHEAP_ACTIVATIONS = ("identity", "relu", "leaky_relu")
TENSOR_ROW_STEP_ROW_CLOCKS = 35
TENSOR_ROW_STEP_INPUTS_PER_CLOCK = 2
TENSOR_ROW_STEP_PARTIALS_PER_CLOCK = 2_200, 1_000
TENSOR_ROW_STEP_CACHED_BYTES = 32 << 20

# It is taken if it is counted at less than so many tenths of the other ways.  Of those networks what is chosen so
# takes 1.017 of the fastest way in the mean, 1.22 at most.
TENSOR_ROW_STEP_TENTHS = 9

# fused/input_layer.cuh makes a first layer in launches of its own, where its inputs are too long for a block or that
# is counted to be faster.  Fitted on 30 launches of 15 networks on an H100 (rms error of 16 %): the bytes in a clock
# that the data set comes at, and those that a multiprocessor has from the second-level cache; and the clocks of 16 by
# 16 inputs that each warp of a block multiplies, for each 16 outputs and product of components, for each component
# that numbers are split into, and for all else.  Launch by launch a step of such a network takes so many tenths of what
# its products are counted at, and so many passes over its inputs: of 22 networks 17 go apart by that, of which 15 take
# 0.15 to 0.92 of their time so, and two 1.02 and 1.12.
INPUT_LAYER_IS_APART = True
INPUT_LAYER_MOST_N = 128
INPUT_LAYER_OTHERS_TENTHS, INPUT_LAYER_PASSES = 6, 3
INPUT_LAYER_BYTES_PER_CLOCK, INPUT_LAYER_CACHE_BYTES_PER_CLOCK = 1_100, 20
INPUT_LAYER_PRODUCT_CLOCKS, INPUT_LAYER_SPLIT_CLOCKS, INPUT_LAYER_STEP_CLOCKS = 32, 120, 200

# --- stacks of locally connected layers in one kernel ---

STACKS_ARE_USED = True  # False: every layer is a launch

# Each pass of rows has messages of its own.  Not measured: follows from the memory that these take.
STACK_MOST_ROWS = 32

# By the rows of a pass: as many warps of a block as leave a thread the registers that it needs, as ptxas counts them.
STACK_MOST_WARPS = {8: 7, 4: 11, 2: 19, 1: 27}

# Weight rows of a stage of the ring, if that leaves so many stages; else one.  N = 50,000, spans of 384 columns: 4.62
# -> 4.36 µs a layer, since a warp waits 8 times and not 29.
STACK_STAGE_ROWS = 4
STACK_LEAST_STAGES = 8

# --- the persistent kernel, which keeps a whole network on the chip ---

PERSISTENT_IS_USED = True  # False: every plan trains launch by launch

# True: at most so many rows train by tiles of all weights, where these fit into shared memory, and where no block owns
# rows or would receive so many words of messages in a step.
FEW_ROWS_ARE_PERSISTENT = True
PERSISTENT_FEW_ROWS = 8
FEW_ROWS_LEAST_WORDS = 36_000

# Each row's part of the loss is kept for every step of a launch: 32 MiB for so many.  Not measured: follows from that.
PERSISTENT_MOST_ROWS = 1024

# Weights of a layer of which each block holds a copy, and of all such layers.  Not measured: follows from 64 KiB of 227
# in a block, beside which the tiles of a first layer of 784 by 128 still fit.
MOST_REPLICATED = 8192
MOST_REPLICATED_IN_ALL = 16384

# Blocks for the tiles of replicated layers.  Not measured: follows from their products being a few per cent of a step.
REPLICATED_BLOCKS = 4

# Sixteenths of a block's memory that one layer may take, tried in turn until all layers fit together.  Not measured:
# the first that fits is the fastest by the cost model.
MEMORY_SHARES = (16, 13, 10, 8, 6, 5, 4, 3, 2, 1)

# --- what is promised, whether it gains time or not (benchmarks/choices.py measures both in turns) ---

# Targets are read through a texture object wherever one reaches.  On an H200 it gains nothing: plain loads take 0.4 to
# 1.2 % less of a step of tiny and medium, in all precisions.  False: plain loads everywhere, with the same bits.
TEXTURES_ARE_USED = True

# --- what the host does as well ---

# Values that a kernel draws or looks at: of fewer the host is through before such a kernel is compiled, 1 to 2 s.
KERNEL_LEAST_VALUES = 1 << 20

# Rows of a set whose orders the card makes at once: of fewer the host sorts, at 25 million keys a second, beside steps.
SORT_LEAST_ROWS = 1 << 17

# After the card has waited so many seconds for the host's orders it makes those of other sets too: after the first if
# its kernels are compiled, after the second if they are not, which takes as long.  60,000 rows by 8,192: 372 µs a step
# with orders of the host, 120 with the card's, 83 without shuffling; by 1,024: 47.8, 26.2 and 26.1.
SORT_WAITED_SECONDS = 0.01
SORT_COMPILED_SECONDS = 1.0

# --- what is made ready for several steps in one launch ---

# Split operands of staged inputs stay in the second-level cache (50 MiB) beside a step's other arrays.  Medium in
# bfloat16: 3.5 µs a step -> 9.4 µs for eight, 1.2 a step.
MOST_STAGED_BYTES = 16 << 20

# --- several cards ---

# Ranks exchange the gradient in pieces of at least so many elements, of which each is under way beside the products of
# the next: an exchange of 0.4 MB takes 10 to 17 µs, of 16 MB 76, so 4 MB cost about two latencies.  Not measured here.
EXCHANGE_LEAST_ELEMENTS = 1 << 20

# A weight of so many elements is moved by the one of two ranks that has its slots where it makes its gradient.  784 by
# 1,024 is; a copy of that takes 10 µs of two H100s, and the passes that it spares as much.
MOVED_LEAST_ELEMENTS = 1 << 18

# The only weight of a rank, if it has no more elements, is moved by a launch of its own, behind a product that makes
# its gradient while the other one comes.  So a step of 784-1024-1024-10 takes 5 % less on two H200s in float32, 1 % in
# tf32 and 0 to 2 % in bfloat16.  Of several weights the first was moved so as well: layers of 4,096 by 4,096 took as
# long, and up to 2 % more in bfloat16, and networks drawn at random are counted at 0.95 to 1.09 of the time.
IN_THE_WAIT_MOST_ELEMENTS = 1 << 22

# Of two shards with so many rows each, products leave partial sums of biases' gradients.  A launch that sums them reads
# all deltas again: 268 MB of 32,768 rows and 4,096 columns, counted at 64 µs.  Without it biases wait for the last
# product, and what two ranks exchange of them, counted at 25 µs, hides behind nothing.  Two H200s, 4096 five times at
# 65,536 rows in bfloat16: 20,058 -> 19,381 µs.
BIAS_PARTIALS_LEAST_ROWS = 16_384

# Messages of so many bytes, at most, are sent by a kernel, which copies less in the time than a copy engine but begins
# sooner: those between parts of a network, and those of a gradient of so many bytes.
MESSAGE_KERNEL_MOST_BYTES = 16 << 20
SHARDS_KERNEL_MOST_BYTES = 16 << 20

# --- predictions ---

# Rows that launches of an inference are made for, beside the most of a piece: blocks beyond the rows of a call end at
# once, but the tile of a product follows from the rows that it is made for.  Not measured: follows from steps of 8, in
# which the smallest and the largest tile of a kind lie.
INFERENCE_ROWS = (8, 128, 1024)

# A piece of a large array has so many bytes, as they go to the card, and so many rows at most: 80 µs on the bus, beside
# some 50 µs of the host for its launches and copies.  An array has so many pieces, if each has so many bytes at least,
# since nothing goes up before the first is copied.
INFERENCE_PIECE_BYTES = 4 << 20
INFERENCE_MOST_ROWS = 16384
INFERENCE_PIECES = 16
INFERENCE_LEAST_PIECE_BYTES = 1 << 20

# All buffers of a piece on the card take at most so many bytes, unless it has fewer than 8 rows.  A piece of wide rows
# has more bytes than others, up to so many rows.  Not measured.
INFERENCE_BUFFER_BYTES = 1 << 30
INFERENCE_WIDE_ROWS = 32
INFERENCE_LEAST_ROWS = 8

# Arrays of more bytes are copied by several threads, each a piece at a time: 188 MB 22 -> 5.6 ms, 4.8 MB 0.55 -> 0.63,
# 1.2 MB 0.23 -> 0.45, since to ask and wake a thread takes 50 µs.  In parts of 512 KiB threads gain nothing.
INFERENCE_ALONE_BYTES = 8 << 20

# The driver copies an array to page-locked memory itself, by way of a small room that stays in the cache, if it has
# more bytes than the first of these and no more than the second: 0.44 MB 120 -> 118 µs, 0.94 MB 180 -> 152,
# 3.1 MB 390 -> 318, 16 MB 1,630 -> 1,130, 31 MB 1,980 -> 2,170, 63 MB 2,300 -> 4,380.
INFERENCE_STAGED_BYTES = 1 << 19
INFERENCE_DRIVER_BYTES = 24 << 20

# Of one piece of more bytes, one half goes up while the other is copied: 3.1 MB 495 -> 452 µs.
INFERENCE_WHOLE_BYTES = 1 << 20

# Where there is a compiler and so many cores, C++ copies rows to page-locked memory instead (backends/row_copies/), by
# at most so many threads, one for so many bytes; 0 threads: NumPy or the driver, as above.  Of 16 cores, 188 MB: 6.5 ms
# by NumPy, 9.9 by 4 threads, 6.2 by 8, 4.9 by 12.
INFERENCE_COPY_THREADS = 12
INFERENCE_LEAST_COPY_CORES = 2
INFERENCE_THREAD_BYTES = 256 << 10

# For launches whose rows have fewer bytes NumPy copies, and the card looks for what is not finite: 80 kB 81 µs in all,
# by C++ 100; 3.1 MB 359 and 284.
INFERENCE_LEAST_COPY_BYTES = 1 << 19

# Such threads wait so many seconds for the next copy before they sleep.  3.1 MB: 285 µs with 50 µs, 284 with 200, 275
# with a millisecond.
INFERENCE_AWAKE_SECONDS = 200e-6

# An array of one piece goes up in at most so many parts, each while the next is copied, of so many bytes at least.
# 3.1 MB: 277 µs in two parts, 284 in four, 322 in eight.
INFERENCE_PARTS = 4
INFERENCE_LEAST_PART_BYTES = 512 << 10

# Of arrays of more bytes what is copied is written past the caches: 3.1 MB 284 -> 210 µs, 4.8 MB 421 -> 368, 188 MB
# 8.3 -> 6.2 ms.
INFERENCE_PAST_CACHES_BYTES = 1 << 20

# Of few rows a network of multiply-adds alone is one launch.
NETWORK_IS_USED = True  # False: every prediction is as many launches as its plan asks for

# Layers of fewer weights, after the last one of more, are computed by one block: for all blocks to meet takes 1 µs.
NETWORK_SPREAD_WEIGHTS = 8192

# Of more rows the card looks for inputs that are not finite: the host takes 53 µs for 1 MiB, a launch takes 3.
INFERENCE_CHECKED_ROWS = 128

# --- evaluations ---

# Rows at a time, whatever the batch size, if all buffers take at most so many bytes.  The order in which losses and
# metrics are summed follows from it, so changing it changes bits.  784-128-10, 60,000 rows: 469 batches of 128 rows are
# 2,000 launches of 4 µs; 0.75 ms in all by 8,192.
EVALUATION_ROWS = 8192
EVALUATION_BUFFER_BYTES = 128 << 20

# Rows that launches of an evaluation are made for, beside the most at a time: the tile of a product follows from them.
# 784-128-10, 1,000 rows by launches for 8,192: 148 µs, PyTorch's graph 36.  By these it is not measured: they follow
# from tiles, of which those for 8,192 rows have 8 times the elements of those for 1,024.
EVALUATION_TIERS = (1024, 2048, 4096)
