//! The table of codes: `PL01xx` how a model is written, `PL02xx` what it means, `PL03xx` gradients
//! and update, `PL04xx` shardings, `PL05xx` running, `PL06xx` the command line and its files,
//! `PL07xx` checkpoints.

use super::Code;

/// Every code, in order.
pub const CODES: &[Code] = &[
    Code {
        code: "PL0001",
        title: "a bug in planc",
        text: "A pass left a program that its verifier refuses, or an assertion failed. Nothing in \
               your input can be blamed; planc stops with exit code 101 instead of going on with \
               a program that may compute something else.",
        example: "`propagate-shardings` broke 1 invariant: `h` has no sharding.",
        fix: "Report it, with the command line and the model. `--dump-ir-after all` shows the pass \
              that went wrong.",
    },
    Code {
        code: "PL0101",
        title: "the model is not RON",
        text: "The file could not be read as RON (Rusty Object Notation): a bracket is not closed, \
               a comma is missing, or a value has a type that its field cannot have. The position is \
               where reading stopped, so the cause may be a little before it.",
        example: "layers: [Embedding(vocab: 256 dim: 64)] lacks a comma after 256.",
        fix: "Correct the syntax there. Structs use ( ), lists [ ], maps { }; strings need quotes.",
    },
    Code {
        code: "PL0102",
        title: "unknown field",
        text: "A module or the model has no field of this name. Unknown fields are errors, because \
               a misspelt option that is silently ignored trains another model than the one written.",
        example: "TransformerLayer(kv_head: 2): the field is kv_heads.",
        fix: "Use the field that the report suggests, or remove it. docs/model.md lists all fields.",
    },
    Code {
        code: "PL0103",
        title: "a value of the wrong type",
        text: "The field exists, and its value is of another type: a string where a number belongs, \
               a list where a struct belongs, a negative or fractional number where a size belongs.",
        example: "heads: \"8\" instead of heads: 8.",
        fix: "Write a value of the type that the report names.",
    },
    Code {
        code: "PL0104",
        title: "a field is missing",
        text: "A field without a default is not given. Sizes have no defaults, since a wrong guess \
               would only be found after training.",
        example: "Embedding(dim: 64) does not say how large the vocabulary is.",
        fix: "Add the field.",
    },
    Code {
        code: "PL0105",
        title: "unknown word",
        text: "A word from a closed list was expected (a module, an activation, an element type, an \
               optimizer), and this one is not in it.",
        example: "activation: swigl instead of swiglu.",
        fix: "Use a word of the list in the report.",
    },
    Code {
        code: "PL0106",
        title: "a field or a key is given twice",
        text: "One struct gives the same field two times, or one map the same key. planc does not choose \
               one of the values.",
        example: "Model(sequence: 128, .., sequence: 256); placements: {\"tp\": Shard(0), \"tp\": Shard(1)}.",
        fix: "Remove one of them.",
    },
    Code {
        code: "PL0107",
        title: "an override cannot be applied",
        text: "`--set path=value` replaces one value of the model before it is read. The path does not \
               lead to a field of this model, or the value is not RON.",
        example: "--set layers[9].dim=64 in a model of three layers.",
        fix: "Write the path as in the file: precision.compute=bf16, layers[1].n=4.",
    },
    Code {
        code: "PL0201",
        title: "unknown mesh axis",
        text: "A placement, an option or `--mesh` names an axis that no mesh of the model has. The \
               axes are those of the model's field `meshes`.",
        example: "tp_mesh: \"tpp\", or --mesh dp=2,pt=4.",
        fix: "Correct the name, or add the axis to `meshes`.",
    },
    Code {
        code: "PL0202",
        title: "a placement that the tensor cannot have",
        text: "A placement names a dimension that the tensor does not have, an axis that is not in \
               the mesh, or the same axis for two dimensions; or its parts could not be gathered back \
               in order. planc refuses a layout whose gather would permute the tensor.",
        example: "Shard(1) for a bias, which has dimension 0 only.",
        fix: "Give one placement per axis, of dimensions that exist.",
    },
    Code {
        code: "PL0203",
        title: "a size that an axis does not divide",
        text: "Heads, and the sequence under sequence parallelism, are shared out in whole parts: their \
               number must be a multiple of the axis, since attention works on whole heads and ranks \
               exchange whole pieces of the sequence. Other dimensions of weights and activations may \
               be cut unevenly.",
        example: "heads: 6 on a mesh with tp=4.",
        fix: "Use a size that is a multiple of the axis, or an axis that divides it.",
    },
    Code {
        code: "PL0204",
        title: "KV heads that can be neither shared out nor replicated",
        text: "With grouped-query attention, tp ranks either get some of the KV heads each (tp divides \
               kv_heads), or each KV head is replicated over the same number of ranks (kv_heads \
               divides tp). Anything else would give ranks different numbers of heads.",
        example: "kv_heads: 3 on a mesh with tp=4.",
        fix: "Use a tp that divides kv_heads or is a multiple of it.",
    },
    Code {
        code: "PL0205",
        title: "a mesh with a number of axes that the model does not name",
        text: "`--mesh 2x4` gives sizes only; the model's field `meshes` says what the axes of a mesh \
               of two axes are called. It has no entry for this number.",
        example: "--mesh 2x2x2x2 for a model with names for one, two and three axes.",
        fix: "Add names to `meshes`, or give them on the command line: --mesh dp=2,tp=4.",
    },
    Code {
        code: "PL0206",
        title: "not a mesh",
        text: "The text of the mesh cannot be read, an axis has size 0, or there are more than \
               2^20 ranks.",
        example: "--mesh 2x0, --mesh 2*4.",
        fix: "Write 8, 2x4 or dp=2,tp=4; every axis needs at least one rank.",
    },
    Code {
        code: "PL0207",
        title: "a batch that cannot be shared out",
        text: "The sequences of a step are cut into micro-batches, and each of those over the \
               data-parallel axes, in equal parts. Unequal parts would weigh sequences differently.",
        example: "batch: Global(6) with 2 micro-batches on dp=2 needs a multiple of 4.",
        fix: "Use a batch that is a multiple of micro-batches times data-parallel ranks.",
    },
    Code {
        code: "PL0208",
        title: "sizes that do not fit together",
        text: "Operands of an op, or a module and its input, have sizes that contradict each other. Or \
               they are larger than planning can count: a tensor of more than 2^46 elements, tensors \
               of more than 2^60 bytes together, a step of more than 2^60 operations on a rank.",
        example: "A layer of dim 128 after an embedding of dim 64.",
        fix: "Make the sizes agree; the report names both.",
    },
    Code {
        code: "PL0209",
        title: "a name that fits nothing",
        text: "A pattern in an option (decay, frozen, parameters), a name in tied, a part in names or an op \
               in checkpoint matches nothing in this model. It is an error, because the option would have no \
               effect. Of two names that are tied, the parameter is the one that is declared first, and its \
               alias comes later. Or a pattern has a `[` that no `]` closes.",
        example: "frozen: [\"model.embed.*\"] where the parameter is model.embed_tokens.weight.",
        fix: "Correct the pattern; `planc inspect` lists the parameters. `*` stands for any text. `docs/model.md` has all \
              that a pattern can say.",
    },
    Code {
        code: "PL0210",
        title: "tied parameters of different shapes",
        text: "Tied parameters are one tensor, so their shapes must be the same.",
        example: "A head over 512 tokens, tied to an embedding of 256.",
        fix: "Give both the same sizes, or do not tie them.",
    },
    Code {
        code: "PL0211",
        title: "two parameters, or iterations of two `Repeat`s, of one name",
        text: "Weights, checkpoints and random initial values go by names, so each parameter needs its \
               own, and so does each iteration of a `Repeat`.",
        example: "Two Linear layers that are both called `proj` in the same module; two `Repeat`s with \
                  `prefix: \"model.layers\"` that both count from 0.",
        fix: "Name one of the modules differently, or tie the two parameters if they are meant to be one. \
              `first` says from which number a `Repeat` counts.",
    },
    Code {
        code: "PL0212",
        title: "modules that do not follow one another",
        text: "A module gets another number of tensors than it takes, or the model ends without a \
               loss. Modules read what the one before them made; the last one computes the loss.",
        example: "layers ends with LmHead, without CrossEntropy.",
        fix: "Add the module that is missing, or remove the one too many.",
    },
    Code {
        code: "PL0213",
        title: "an op in a block that cannot be read",
        text: "A block of your own lists ops in their text form. This one is unknown or has attributes \
               that it does not take.",
        example: "matmull instead of matmul.",
        fix: "Use an op and attributes of the table in docs/model.md, \"A block of your own\".",
    },
    Code {
        code: "PL0214",
        title: "a value in a block that nothing defines",
        text: "An op of a block reads a name that is no input, no parameter and no earlier result.",
        example: "Reading `hidden` where the op before it made `h`.",
        fix: "Use one of the names in the report, or move the op behind what it reads.",
    },
    Code {
        code: "PL0215",
        title: "one axis with two jobs",
        text: "An axis shards the batch or the tensor-parallel dimension, or is one of weight storage \
               only; it cannot do two of these, since ranks along it would hold the wrong parts.",
        example: "data_parallel: [\"dp\", \"tp\"] and tp_mesh: \"tp\".",
        fix: "Give each job its own axis.",
    },
    Code {
        code: "PL0216",
        title: "a number out of its range",
        text: "A field has a value that makes no sense: a size of 0, a negative rate, a probability \
               above 1.",
        example: "label_smoothing: 1.5.",
        fix: "Use a value in the range that the report names.",
    },
    Code {
        code: "PL0217",
        title: "a field that has no effect",
        text: "The field exists, and nothing reads it where it is written. It is an error, because what \
               it says would silently not be done.",
        example: "attention: (name: \"attn\", ..) in a TransformerLayer, which names its parts itself; another \
                  init of a tied weight than its first module gives.",
        fix: "Remove it, or write what the report says.",
    },
    Code {
        code: "PL0218",
        title: "a mesh axis without a job",
        text: "An axis with more than one coordinate cuts neither data nor a weight nor an activation, so \
               all ranks along it would do the same work. What cuts something are the axes of \
               data_parallel, fsdp.axes, tp_mesh and placements; weight_mesh only says over which axes \
               scales agree. The defaults of these fields know the names dp, dp_replicate, dp_shard and tp.",
        example: "--set 'meshes={2: [\"fsdp\", \"tensor\"]}' without data_parallel, fsdp.axes and tp_mesh.",
        fix: "Name the axis in one of these fields, or leave it out of the mesh. Where ranks are meant to do \
              the same work, list it in replicas.",
    },
    Code {
        code: "PL0219",
        title: "nothing is trained",
        text: "All parameters are frozen, by frozen or by trainable: false, so a step would change nothing.",
        example: "frozen: [\"*\"].",
        fix: "Leave at least one parameter out of frozen, or write trainable: true for it in parameters.",
    },
    Code {
        code: "PL0301",
        title: "no gradient",
        text: "The loss depends on a parameter through something that has no gradient. The largest logit, \
               ce_max, has one within a cross entropy only, where it cancels: ce_loss must be all that reads \
               the maximum and the sum of exponentials.",
        example: "A trained parameter that only selects rows through integer indices.",
        fix: "Freeze the parameter, or compute the loss through differentiable ops.",
    },
    Code {
        code: "PL0302",
        title: "the update cannot be made",
        text: "Optimizer, clipping and accumulation are ops like all others; operands of one of \
               them do not fit.",
        example: "A master weight of an element type that the optimizer cannot update.",
        fix: "Store the parameter in f32, or freeze it.",
    },
    Code {
        code: "PL0303",
        title: "a GEMM cannot be quantized",
        text: "Quantization is ops like all others; operands of one of them do not fit.",
        example: "A weight in an element type of which there are no codes.",
        fix: "Compute in f32 or bf16, or give the module `recipe: Bf16`.",
    },
    Code {
        code: "PL0304",
        title: "no GEMM multiplies operands quantized like these",
        text: "A recipe quantizes the two operands of a GEMM in ways that do not go together. Both have one \
               scale per tensor, or both have blocks of 128, or both are of MXFP8 or NVFP4; not both are E5M2, \
               and not both have blocks of 128x128.",
        example: "`Custom(input: (format: E4M3, scaling: Current()), weight: (format: E4M3, scaling: Block(rows: \
                  128, columns: 128)))`.",
        fix: "Give both operands scalings of one kind, or leave one of them out: the GEMMs that read it then \
              stay in the compute type.",
    },
    Code {
        code: "PL0305",
        title: "a trained parameter on which the loss does not depend",
        text: "No op reads the parameter, or nothing leads from those that do to the loss. It would have no \
               gradient, and be saved as it started.",
        example: "A parameter of a block whose ops all read another one.",
        fix: "Remove it, use it, or freeze it: frozen: [\"own.weight\"], or trainable: false in the block.",
    },
    Code {
        code: "PL0401",
        title: "no legal sharding, or no way to it",
        text: "The placements that are pinned leave an op without any layout under which its \
               result is right, or a tensor cannot be moved from one layout to the next. planc never \
               falls back to a layout that only looks right.",
        example: "A pinned strided shard of 7 rows that has to be moved to an axis of 2.",
        fix: "Remove or change one of the placements of the tensor in the report.",
    },
    Code {
        code: "PL0502",
        title: "more ranks than this machine can run",
        text: "Without a launcher each rank is a thread of this process. A plan for thousands of ranks \
               compiles and can be inspected anywhere, but running it here would say nothing about the \
               real machine.",
        example: "planc run of a plan for --mesh 1000x1000.",
        fix: "Compile for a smaller mesh: the program is the same, only its shapes differ.",
    },
    Code {
        code: "PL0503",
        title: "not enough memory for all ranks",
        text: "Every rank needs its two arenas, and together they are larger than the memory of this \
               machine. planc says so before it starts.",
        example: "llama3-8b.ron on 8 CPU ranks.",
        fix: "Use a smaller mesh, model, batch or sequence.",
    },
    Code {
        code: "PL0504",
        title: "the plan is broken",
        text: "The plan contradicts itself: a buffer outside its arena, an instruction over the wrong \
               number of buffers. A compiler that verifies does not write such plans, so it was \
               probably edited.",
        example: "A buffer's shape was changed by hand, but not its offset.",
        fix: "Compile the model again.",
    },
    Code {
        code: "PL0505",
        title: "a rank panicked",
        text: "An assertion failed on one rank, which ended all of them. This is a bug in planc.",
        example: "index out of bounds in a kernel.",
        fix: "Report it, with the command line and the plan.",
    },
    Code {
        code: "PL0506",
        title: "stopped because another rank failed",
        text: "The rank itself is fine; the first failure, on another rank, is the one to read.",
        example: "Rank 3 ran out of data; ranks 0 to 2 stop.",
        fix: "See the first error.",
    },
    Code {
        code: "PL0507",
        title: "a thread could not be started",
        text: "The system refused another thread: a limit on processes or on memory.",
        example: "ulimit -u is lower than the number of ranks.",
        fix: "Use a smaller mesh, or raise the limit.",
    },
    Code {
        code: "PL0508",
        title: "an integer that f32 does not carry",
        text: "The CPU back end computes in f32, which is exact for integers up to 2^24 only. A larger \
               token id would silently become its neighbour.",
        example: "A token id of 20,000,000.",
        fix: "Use a vocabulary below 2^24.",
    },
    Code {
        code: "PL0509",
        title: "an op made a fraction where integers belong",
        text: "The result of an op holds integers, and it computed something else. This is a bug in \
               the op.",
        example: "0.5 in a buffer of type i32.",
        fix: "Report it, with the command line and the plan.",
    },
    Code {
        code: "PL0510",
        title: "an op left its result unwritten",
        text: "An op must write every element of its result. This is a bug in the op.",
        example: "The last row of a buffer keeps what was there before.",
        fix: "Report it, with the command line and the plan.",
    },
    Code {
        code: "PL0511",
        title: "an op wrote into padding",
        text: "Uneven shards are padded, and padding is zero so that sums over it are right. An op put \
               something else there. This is a bug in the op.",
        example: "exp(0) = 1 beyond the end of a shorter shard.",
        fix: "Report it, with the command line and the plan.",
    },
    Code {
        code: "PL0512",
        title: "ranks came to different collectives",
        text: "All ranks run one program, so they meet at the same collectives. These did not. This is \
               a bug in planc.",
        example: "Rank 0 is at an all-gather and rank 1 at the reduction after it.",
        fix: "Report it, with the command line and the plan.",
    },
    Code {
        code: "PL0513",
        title: "the plan has no such buffer",
        text: "Something was asked for by a name that the plan does not have.",
        example: "Reading model.wq.weight, which is called model.layers.0.self_attn.q_proj.weight.",
        fix: "`planc inspect` lists the names.",
    },
    Code {
        code: "PL0514",
        title: "a temporary cannot be read or written from outside",
        text: "Temporaries share memory and hold nothing between sections. Parameters, states and \
               inputs can be read and written.",
        example: "Reading an activation after the step.",
        fix: "Read a parameter or a state, or make the value a result of the model.",
    },
    Code {
        code: "PL0515",
        title: "another number of elements",
        text: "What is written must have as many elements as the tensor.",
        example: "A batch of 4 sequences for a plan made for 8.",
        fix: "Give as many elements as the report says.",
    },
    Code {
        code: "PL0516",
        title: "an input that data cannot fill",
        text: "`planc run` fills the inputs tokens, labels, lr and seed. This model has another \
               one.",
        example: "A model with an input `mask`.",
        fix: "Name the inputs so, or run the plan through the library.",
    },
    Code {
        code: "PL0517",
        title: "too many steps in a row are not finite",
        text: "The loss, or the norm of all gradients, was infinite or no number. Such a step changes no \
               weight, no state of the optimizer and no history of amaxes; its data is consumed, and the \
               schedule goes on. The first of them is repeated call by call, and a warning names the \
               instruction that made the first number that is not finite. After too many in a row the run ends.",
        example: "A learning rate of 1e38.",
        fix: "Resume from a checkpoint, with a lower learning rate or other data. `--max-nonfinite N` allows \
              more such steps in a row, `--on-nonfinite stop` none.",
    },
    Code {
        code: "PL0520",
        title: "a file cannot be read or written while running",
        text: "The system refused it, or it is a device, or text of more than 1 GiB. The report has the \
               reason. Models, plans, profiles and mappings may also come out of a pipe, as in \
               `planc compile /dev/stdin`; weights, data and checkpoints are regular files.",
        example: "--weights of a file that does not exist; --metrics into a folder without rights.",
        fix: "Check the path and its permissions.",
    },
    Code {
        code: "PL0521",
        title: "a file is not what its name says",
        text: "A .safetensors file without a valid header, a .bin whose size is no whole number of \
               tokens, a text that is empty.",
        example: "A Git LFS pointer instead of the weights.",
        fix: "Fetch or write the file again.",
    },
    Code {
        code: "PL0522",
        title: "less data than one step needs",
        text: "One step reads batch times sequence tokens and the one after each sequence. The file \
               has fewer.",
        example: "A text of 100 bytes for 8 sequences of 128 tokens.",
        fix: "Give more data (several files are joined), or compile with a smaller batch or sequence.",
    },
    Code {
        code: "PL0523",
        title: "the data is used up",
        text: "The file holds the batches of a fixed number of steps ([steps, batch, seq+1]), and \
               more steps were asked for. Such files are not read twice.",
        example: "--steps 30 with a file of 20 steps.",
        fix: "Run with as many steps as there are.",
    },
    Code {
        code: "PL0524",
        title: "tokens of another shape",
        text: "A safetensors file of data has a tensor `tokens` of [N, seq+1] or [steps, batch, \
               seq+1], for the sequence and batch of the plan.",
        example: "[1000, 128] for a sequence of 128, which needs rows of 129.",
        fix: "Write the file with one token more per row, or compile with another sequence.",
    },
    Code {
        code: "PL0525",
        title: "data files of different kinds",
        text: "Several files are joined to one, so all must be token streams, or all rows, or all \
               fixed steps.",
        example: "--data a.bin b.safetensors.",
        fix: "Give files of one kind.",
    },
    Code {
        code: "PL0526",
        title: "a token outside the vocabulary",
        text: "The embedding has no row for this token. Reading another row, or none, would train on \
               something else than the data.",
        example: "Token 50257 in a model with vocab: 50257, whose last token is 50256.",
        fix: "Use the tokenizer that the model was made for, or a larger vocabulary.",
    },
    Code {
        code: "PL0527",
        title: "the checkpoint was trained on other data",
        text: "A checkpoint names the data that its run read: files, sizes, a digest of each (docs/checkpoints.md says what \
               is hashed), and the type of tokens. A run that goes on reads these files, also from another path if sizes \
               and digests agree. A file that is not there, that has changed, or another one, is refused: training would go \
               on at a place of data that means nothing in it.",
        example: "planc run model.ron --mesh 8 --save ckpt --resume, after the file of tokens was moved.",
        fix: "Name the files with --data, or add --change-data to go on with other data, or with generated tokens.",
    },
    Code {
        code: "PL0530",
        title: "weights with other names",
        text: "Weights are loaded by parameter name. Every parameter must be in the files, and every \
               tensor of the files must be a parameter.",
        example: "layers.0.wq.weight in the file, model.layers.0.self_attn.q_proj.weight in the model.",
        fix: "Rename the tensors, or the model's modules; `planc inspect` lists the names.",
    },
    Code {
        code: "PL0531",
        title: "weights of other shapes",
        text: "A tensor of the file has the right name and another shape than the parameter.",
        example: "[256, 64] in the file, [512, 64] in the model.",
        fix: "Use the weights of this model, or change its sizes.",
    },
    Code {
        code: "PL0532",
        title: "an element type that is no weight",
        text: "Weights are read from F32, BF16, F16 and F64, and converted to the storage type.",
        example: "A tensor of I64.",
        fix: "Convert the file.",
    },
    Code {
        code: "PL0533",
        title: "tied weights that differ",
        text: "Two tensors of the file are one tensor in the model, and their values are not the same. \
               planc does not choose.",
        example: "lm_head.weight and model.embed_tokens.weight of an untied model.",
        fix: "Remove one of them from the file, or do not tie them in the model.",
    },
    Code {
        code: "PL0540",
        title: "no NVIDIA driver",
        text: "`--device cuda` was asked for and libcuda.so.1, which comes with the driver, was not \
               found by the loader. Nothing else is looked for then.",
        example: "Running on a laptop, or in a container without `--gpus all`.",
        fix: "Install the driver, start the container with GPUs, or run with `--device cpu`. \
              `planc doctor` shows what the machine has.",
    },
    Code {
        code: "PL0541",
        title: "a GPU that does not exist",
        text: "A rank is to run on a GPU that this machine does not have: the mesh has more ranks \
               than there are GPUs, or CUDA_VISIBLE_DEVICES hides some.",
        example: "`--mesh 4` on a machine with 2 GPUs.",
        fix: "Compile for a mesh of as many ranks as there are GPUs, or start more machines with \
              torchrun or Slurm.",
    },
    Code {
        code: "PL0542",
        title: "a CUDA library is missing",
        text: "cuBLASLt, cuDNN, NCCL and NVRTC are looked for in LD_LIBRARY_PATH, in NVIDIA's wheels \
               of the active Python, in the CUDA toolkit and where the loader looks. The message says \
               which one was looked for, and where.",
        example: "A machine with a driver and no PyTorch.",
        fix: "Install the wheel that the message names, activate the environment that has it, or add \
              the library's folder to LD_LIBRARY_PATH.",
    },
    Code {
        code: "PL0543",
        title: "a CUDA library of another version",
        text: "The library was found and lacks a function that is needed, so it is older or newer than \
               what planc was written for.",
        example: "cuDNN 8 in front of cuDNN 9 in LD_LIBRARY_PATH.",
        fix: "Use the versions that `planc doctor` names as tested.",
    },
    Code {
        code: "PL0544",
        title: "a CUDA call failed",
        text: "The driver or a library returned an error; the message has the call and the status. An \
               asynchronous fault shows at a later call than the one that made it.",
        example: "cuMemcpyDtoH failed: CUDA_ERROR_ILLEGAL_ADDRESS.",
        fix: "Run again with PLANC_CUDA_SYNC=1, which waits after each instruction, so that the right \
              one is named. Look for Xid lines in `dmesg`: hardware fails too.",
    },
    Code {
        code: "PL0545",
        title: "the GPU's memory is full",
        text: "The arenas and workspaces of the plan are allocated once, at the start, and did not fit \
               beside what the GPU already holds.",
        example: "A plan of 90 GiB a rank on a GPU of 80 GiB, or another job on the same GPU.",
        fix: "Use a larger mesh, a smaller batch, or `checkpoint` in the model; `planc compile` prints \
              the memory of a rank. `nvidia-smi` shows who else uses the GPU.",
    },
    Code {
        code: "PL0546",
        title: "no kernel for an op",
        text: "The CUDA backend has no kernel for this op with these element types or sizes.",
        example: "A head dimension over 256.",
        fix: "Change the model, or run with `--device cpu`, which runs every op.",
    },
    Code {
        code: "PL0550",
        title: "a kernel that does not compile",
        text: "planc compiles its kernels with NVRTC when a plan is loaded. NVRTC does not take one of \
               them for this GPU's architecture, which is a bug of planc, or an NVRTC of another version \
               than it was made for.",
        example: "A GPU older than what a kernel uses.",
        fix: "Install the version of NVRTC that `planc doctor` names; else report it, with the log.",
    },
    Code {
        code: "PL0551",
        title: "a section that does not end",
        text: "No stream of the GPU moved, or no data of another CPU rank came, for as long as the timeout \
               allows. Collectives wait for all \
               ranks, so one that is stuck, gone or very late stops all; no library reports it. The report \
               says which collective each stream had come to.",
        example: "A process that was killed while the others wait for its gradients.",
        fix: "Look at the other ranks' messages. If a single instruction really takes that long, set \
              PLANC_TIMEOUT_S to more seconds.",
    },
    Code {
        code: "PL0552",
        title: "the GPU reported a fault",
        text: "An instruction went wrong on the GPU, which reports it later and does not say which one it \
               was. The process cannot use the GPU any more.",
        example: "A kernel that reads beyond its operands; a GPU that fell off the bus.",
        fix: "Run again with PLANC_CUDA_SYNC=1, which waits after each instruction, and report what it \
              names.",
    },
    Code {
        code: "PL0560",
        title: "not all that says which rank this process is",
        text: "A process of a run with several needs its rank, how many there are, its number on this \
               machine (for its GPU), and where rank 0 is. They come from flags, else from the \
               variables of torchrun, else from those of Slurm; a set that is incomplete is an error, \
               since a wrong guess would let ranks wait for each other.",
        example: "RANK and WORLD_SIZE are set and MASTER_ADDR is not.",
        fix: "Set what the report says is missing, or unset the others to run all ranks in one process.",
    },
    Code {
        code: "PL0561",
        title: "a rank, size or address that cannot be",
        text: "A flag or variable that says which rank this process is has a value that is no number, \
               out of range, or no address.",
        example: "--rank 8 with --world-size 8: ranks count from 0.",
        fix: "Correct the value that the report names.",
    },
    Code {
        code: "PL0562",
        title: "not as many processes as ranks",
        text: "Every rank of the mesh is one process (or, without a launcher, one thread). The launcher \
               started another number than the mesh has.",
        example: "torchrun --nproc-per-node 4 with --mesh 2x4.",
        fix: "Start as many processes as the mesh has ranks, or change the mesh.",
    },
    Code {
        code: "PL0563",
        title: "the ranks cannot meet",
        text: "Rank 0 listens on the master's port and the others connect to it. A rank did not come in \
               time, the port is taken by another program or run, or the host cannot be reached. Or CPU \
               ranks, which also connect to each other to exchange data, cannot do so.",
        example: "One of two nodes was never started; a firewall between the nodes.",
        fix: "Check that all ranks were started and that the master's address is reachable from all \
              nodes; give another port, or more time with --timeout.",
    },
    Code {
        code: "PL0564",
        title: "the ranks were not started alike",
        text: "All ranks run one program on one plan with the same options, or they would wait for each \
               other in different places. When they meet they compare them.",
        example: "One node has an older model.ron, or another --seed.",
        fix: "Start all ranks with the same planc, model and options.",
    },
    Code {
        code: "PL0565",
        title: "a rank is gone",
        text: "A process of the run ended without saying why, or nothing is heard of it any more. The \
               others cannot go on without it and end too.",
        example: "The system killed a process that used too much memory; a node lost power.",
        fix: "Look at the output of that rank and at its node's log, then start the run again.",
    },
    Code {
        code: "PL0566",
        title: "a tensor that is spread over processes",
        text: "Reading a global tensor needs all of its shards, and this process has those of one rank.",
        example: "Session::read of a sharded weight under torchrun.",
        fix: "Read it in a run with one process, or read what this rank holds.",
    },
    Code {
        code: "PL0567",
        title: "a job secret that cannot be used",
        text: "The processes of a run prove to each other that they know one secret, so that nobody else \
               joins or ends it. It comes from `--job-secret-file`, PLANC_JOB_SECRET_FILE or \
               PLANC_JOB_SECRET. The file cannot be read, or what is in it is too short to keep a \
               guesser out.",
        example: "PLANC_JOB_SECRET=hunter2.",
        fix: "Make one in the script that starts all ranks: `export PLANC_JOB_SECRET=$(openssl rand -hex \
              32)`.",
    },
    Code {
        code: "PL0601",
        title: "a file cannot be read or written",
        text: "The system refused it; the report has its reason.",
        example: "planc compile of a file that does not exist, or of a directory.",
        fix: "Check the path and its permissions.",
    },
    Code {
        code: "PL0602",
        title: "a file is not UTF-8 text",
        text: "Models, plans and IR are text. This file has bytes that are none, so it is another \
               kind of file, or damaged.",
        example: "planc run model.safetensors.",
        fix: "Name a model (.ron), a plan (.plan) or IR (.ir).",
    },
    Code {
        code: "PL0603",
        title: "a plan or IR that cannot be read",
        text: "The text form of a program is strict: what is printed can be read again, and nothing \
               else. The file was cut off, edited, or written by another version.",
        example: "A plan whose end is missing because the disk was full.",
        fix: "Compile the model again.",
    },
    Code {
        code: "PL0604",
        title: "a plan for another mesh",
        text: "A plan is made for one mesh. `--mesh` can repeat it, not change it.",
        example: "planc run model.plan --mesh 8, where the plan was compiled for 2x4.",
        fix: "Leave out `--mesh`, or compile the model for the other mesh.",
    },
    Code {
        code: "PL0605",
        title: "a model needs a mesh",
        text: "What a rank holds, sends and computes depends on the mesh, so there is no default.",
        example: "planc run model.ron.",
        fix: "Add --mesh: 1 for a single rank, 8, 2x4, or dp=2,tp=4.",
    },
    Code {
        code: "PL0606",
        title: "unknown pass",
        text: "`--dump-ir-after` takes names of passes, or `all`.",
        example: "--dump-ir-after localise.",
        fix: "Use one of the names in the report.",
    },
    Code {
        code: "PL0607",
        title: "not a coordinate of the mesh",
        text: "`--coord` has an axis that the mesh does not have, an axis twice, or an index beyond its size. Axes \
               are those of `--mesh`, not the parts that the compiler cuts them into.",
        example: "--coord tp=4 on a mesh with tp=4, whose last index is 3.",
        fix: "Use the axes and sizes of the mesh; indices count from 0.",
    },
    Code {
        code: "PL0608",
        title: "no tensor of this name",
        text: "`--param` fits no parameter (or state, with --states) of the plan.",
        example: "--param q_proj, which is a part of a name; write `*q_proj*`.",
        fix: "Use `*` for the parts of the name that may be anything.",
    },
    Code {
        code: "PL0609",
        title: "an option that cannot be used here",
        text: "An option has a value that makes no sense, or does not go with this kind of file.",
        example: "--steps 0; --set with a plan, which is compiled already.",
        fix: "Change or leave out the option.",
    },
    Code {
        code: "PL0610",
        title: "unknown code",
        text: "`planc explain` knows the codes that planc reports.",
        example: "planc explain PL9999.",
        fix: "`planc explain --list` lists all of them.",
    },
    Code {
        code: "PL0611",
        title: "a denied lint",
        text: "`--deny` makes an error of what is legal but probably not meant; see the lint in the \
               report.",
        example: "--deny uneven on a mesh that does not divide a weight.",
        fix: "Change what the lint is about, or do not deny it.",
    },
    Code {
        code: "PL0612",
        title: "a plan or IR breaks a promise",
        text: "The file can be read, and what it says cannot be right: a buffer is read before it is \
               written, two instructions race, buffers overlap, a gradient reaches no optimizer, or a \
               shape does not fit its op. What planc writes is checked, so the file was edited. Running \
               it would give wrong numbers. `planc verify` prints all that was checked of a plan.",
        example: "A plan from which the line of an `all_reduce` was deleted.",
        fix: "Compile the model again.",
    },
    Code {
        code: "PL0613",
        title: "the output would overwrite what is read",
        text: "A file to write (`-o`, `--html`, `--write-certificate`, `--trace`, `--metrics`) is one that the command reads, \
               a model, or a part of a checkpoint; or two of them are one file. planc does not write over what was \
               written by hand or by a run.",
        example: "planc compile model.ron --mesh 8 -o model.ron.",
        fix: "Name another file: -o model.plan.",
    },
    Code {
        code: "PL0614",
        title: "the output would overwrite a file that planc did not write",
        text: "A file to write (`-o`, `--html`, `--write-certificate`, `--trace`, `--metrics`, `--dump-dir`, pages of `man`) \
               is there, and does not begin as planc begins files of this format. planc overwrites an empty file, and its \
               own of the same format; what else is there may be data, weights or a script.",
        example: "planc run model.ron --mesh 1 --metrics tokens.jsonl, where tokens.jsonl is a dataset.",
        fix: "Name another file, or add --force if the one that is there may go.",
    },
    Code {
        code: "PL0630",
        title: "this machine cannot run plans on a GPU",
        text: "`planc doctor` found no GPU, no driver, or not all libraries. Its report says what is \
               missing and how to get it.",
        example: "A login node without GPUs.",
        fix: "Install what is missing, or run with `--device cpu`.",
    },
    Code {
        code: "PL0631",
        title: "a GPU that computes something else",
        text: "`planc doctor --check` ran every op on the GPU and found results that differ from the \
               op's reference by more than rounding, elements that were not written, or writes beside \
               a result.",
        example: "A driver or a library with a bug, faulty memory, or a bug of planc.",
        fix: "Report it with the lines that the command printed. Do not train on this machine.",
    },
    Code {
        code: "PL0632",
        title: "the GPU differs from the CPU",
        text: "`planc run --compare cpu` ran every instruction on both, from the same operands, and one \
               result is further away than rounding explains. The message names the first.",
        example: "A kernel that reads beyond a shard.",
        fix: "Report it, with the plan. `planc doctor --check` shows whether the op is wrong by itself.",
    },
    Code {
        code: "PL0650",
        title: "an unknown target",
        text: "`--target` takes the name of a profile that comes with planc, or a file with one of your own: a \
               machine's rates, bandwidths and memory, as the cost model needs them.",
        example: "planc compile model.ron --mesh 8 --target v100.",
        fix: "Name one of the list, or write a profile as docs/cost.md describes it.",
    },
    Code {
        code: "PL0651",
        title: "a profile that cannot be read",
        text: "The file is no RON, lacks a field or has one too many, or has a number that no machine has: a rate of \
               0, a time of 1e9 seconds, or two measurements of a collective of which the larger has the lower bandwidth.",
        example: "bandwidth: (0, Assumed(\"to be measured\")).",
        fix: "Correct what the message names; ir/profiles/h200.ron has every field.",
    },
    Code {
        code: "PL0652",
        title: "a plan that takes more memory than there is",
        text: "A rank needs more bytes than `--mem-limit` allows, or than `--target` has. The report names the \
               moment of the peak, the tensors that are there then, and choices that take less, each compiled, with \
               its own peak. With a target, what it takes beside the plan counts: context, modules, communicators.",
        example: "planc compile llama3-70b.ron --mesh 8 --target h100.",
        fix: "Make one of the choices that fit, use more ranks, or allow more.",
    },
    Code {
        code: "PL0653",
        title: "a target that lacks a kind of GEMM",
        text: "The recipe has GEMMs in FP8, and the profile has no rate for them: the machine cannot run the plan.",
        example: "planc compile llama-tiny-fp8.ron --mesh 8 --target a100.",
        fix: "Train without the recipe there, or name a machine that multiplies in FP8.",
    },
    Code {
        code: "PL0654",
        title: "no mesh to compare",
        text: "`planc sweep` compiles a model for every sensible mesh of so many GPUs, and none of them has a plan. \
               The report has each mesh with what is in its way.",
        example: "planc sweep model.ron --gpus 64 --target h200, of a model with a batch of 2.",
        fix: "Change what the reasons name; a batch that all meshes divide is `--set batch=PerReplica(1)`.",
    },
    Code {
        code: "PL0655",
        title: "a certificate of another plan",
        text: "`planc verify --certificate FILE` proves a plan and compares it with a certificate that was written \
               before: the digests, the mesh, the properties, their claims and counts. Only the version of planc may \
               differ. The error names the facts that do. A certificate with the same digest was edited. Another \
               digest is another plan: it was edited, or compiled from another model, for \
               another mesh, with other options or by another planc. The digest of the model says which: it depends on \
               neither the mesh nor on options of compiling.",
        example: "planc verify edited.plan --certificate c.json, where c.json is of model.plan.",
        fix: "Compile the model as it was compiled then, or write a certificate of this plan with \
              `--write-certificate`.",
    },
    Code {
        code: "PL0701",
        title: "no checkpoint",
        text: "A checkpoint is a folder with the index `.metadata`, a folder whose file `latest` names \
               one, or safetensors files. `.metadata` is written last, so a folder with data and without \
               it is of a save that was not finished.",
        example: "planc ckpt ls ckpt, where ckpt has step-50 and step-100 and no `latest`.",
        fix: "Name the folder of one step, or an older one if this save was not finished.",
    },
    Code {
        code: "PL0702",
        title: "a file of a checkpoint cannot be read or written",
        text: "The system refused; its own words are in the report. A file that the index names and \
               that is not there is reported so too.",
        example: "`__3_0.distcp` was not copied with the others.",
        fix: "Copy the whole folder, files that start with a dot too, and see to permissions and space.",
    },
    Code {
        code: "PL0703",
        title: "the index of a checkpoint is broken",
        text: "`.metadata`, a header of a safetensors file, or a file of checksums is not what it should \
               be, or contradicts itself: it is cut off, a byte changed, a box is stored nowhere, a \
               file is of another save than the index.",
        example: "A copy of `.metadata` that ends early.",
        fix: "Copy the file again, or use an older checkpoint.",
    },
    Code {
        code: "PL0704",
        title: "a pickle names what it must not",
        text: "`.metadata` and Python objects are pickles, which can name any function, and Python calls \
               it when it loads them. planc calls nothing: it knows the names that checkpoints need \
               and refuses all others. So an object of a class of yours is refused as well as an attack.",
        example: "A pickle with `os.system`.",
        fix: "If you do not know who made the file, do not load it in Python. If the object is yours, \
              save its numbers and texts instead.",
    },
    Code {
        code: "PL0705",
        title: "an item of a checkpoint is broken",
        text: "The bytes of a box or an object are not an archive of `torch.save`, or are of another \
               type or size than the index says: the file is cut off, is of another save, or has the \
               name of another file.",
        example: "`__0_0.distcp` and `__1_0.distcp` with each other's names.",
        fix: "`planc ckpt verify` lists all such items. Copy their files again, or use an older checkpoint.",
    },
    Code {
        code: "PL0706",
        title: "bytes of a checkpoint changed",
        text: "The checksum of some bytes is another one than when they were written. PyTorch stores \
               checksums and does not look at them; a bit that flipped becomes a weight.",
        example: "A disk or a copy with an error.",
        fix: "Copy the file again, or use an older checkpoint.",
    },
    Code {
        code: "PL0707",
        title: "no such key",
        text: "The checkpoint has no tensor or object of this name. Names are those of the nested dict \
               that was saved, joined with dots.",
        example: "norm.weight where the checkpoint has model.norm.weight.",
        fix: "`planc ckpt ls` lists all keys.",
    },
    Code {
        code: "PL0708",
        title: "boxes do not make up a tensor",
        text: "A tensor is stored in boxes, and every element must be in exactly one of them. Elements \
               in none would keep whatever value they had, without an error, in PyTorch.",
        example: "A checkpoint with an index for each rank, of which one is missing.",
        fix: "Copy what is missing. If nothing is, the save was wrong; use an older checkpoint.",
    },
    Code {
        code: "PL0709",
        title: "a box outside of its tensor",
        text: "More was asked for than the tensor has.",
        example: "Row 8 of a tensor of 8 rows.",
        fix: "`planc ckpt ls` lists all shapes.",
    },
    Code {
        code: "PL0710",
        title: "a checkpoint is not whole",
        text: "`planc ckpt verify` found problems, each with its file, key and byte. All are listed, \
               since one broken copy often has several.",
        example: "A folder that was copied while it was written.",
        fix: "Copy the files that are named again, or use an older checkpoint.",
    },
    Code {
        code: "PL0711",
        title: "two checkpoints differ",
        text: "`planc ckpt diff` found keys, types, shapes or values that are not the same in both. How \
               tensors were cut does not matter.",
        example: "Checkpoints of two steps.",
        fix: "Nothing, if they should differ; the exit code is for scripts.",
    },
    Code {
        code: "PL0712",
        title: "a folder that another run saves into",
        text: "One run at a time saves into a folder of checkpoints: two would remove each other's. The run has the \
               lock of the folder, the file `.lock`, which says whose process it is and on which machine. The lock \
               of a process of this machine that has ended is taken over at once. Elsewhere the run is taken for \
               dead once its heartbeat has stood still for 60 s.",
        example: "A scheduler that starts a job again while the old process still lives.",
        fix: "Wait until that process has ended, or end it. Or save into another folder.",
    },
    Code {
        code: "PL0713",
        title: "a run that lost the folder that it saves into",
        text: "The process stood still for so long that another run took it for dead and took over the lock of the \
               folder. It ends and writes nothing more there. What it had saved is as it was.",
        example: "A process that was stopped with SIGSTOP, or a file system that gave no answer for a minute, while \
                  the job was started again.",
        fix: "Let the other run go on. If it is not wanted, end it, and start this one again with `--resume`.",
    },
    Code {
        code: "PL0750",
        title: "a state that no checkpoint holds",
        text: "A state that outlives a step is a partial value: what it stands for is the sum (or another \
               reduction) of what the ranks hold. A checkpoint has values, not summands, so such a state \
               cannot be saved, unless the step ends with zeros in it.",
        example: "A plan that was edited so that an accumulator is not cleared.",
        fix: "Compile the plan again. If planc made it so, report it.",
    },
    Code {
        code: "PL0751",
        title: "a checkpoint was not saved",
        text: "A rank could not write its part, or did not in time, so that there is no checkpoint of this \
               step. Those saved before are untouched, and `latest` names the newest of them. Training \
               ends, or goes on with `--save-failed continue`.",
        example: "The disk is full, a folder may not be written, a process of the run was killed.",
        fix: "Do what the reason asks for, then go on with `--load` from the last checkpoint.",
    },
    Code {
        code: "PL0752",
        title: "a checkpoint of another model",
        text: "What the plan needs and what the checkpoint has do not agree. The report counts everything and \
               lists the first ten of each kind: \
               keys that are missing, keys that nothing needs, other shapes, other element types. planc \
               loads nothing in part by itself, since weights that keep their random start train, too.",
        example: "A checkpoint of 16 layers for a model of 32, or of f32 weights for weights in bf16.",
        fix: "Load it with its model. `--allow-missing` and `--allow-unexpected` take globs of keys that may \
              differ (`optim.*` to load weights alone), `--cast` rounds other floating-point types.",
    },
    Code {
        code: "PL0755",
        title: "a folder with checkpoints of another run",
        text: "`--save` names a folder that holds checkpoints which this run does not go on from. Steps of two \
               runs side by side would look like one history, and `--keep` would remove those of the other.",
        example: "A command line with `--save ckpt` that is started a second time.",
        fix: "Go on from it with `--load`, or with `--resume`, which also starts the first time. Or name another \
              folder. With `--overwrite` the run starts anew, and the checkpoints that are there are removed \
              once there is a new one.",
    },
    Code {
        code: "PL0780",
        title: "a config.json that cannot be read",
        text: "`planc import hf` was given something that is no JSON object, or a field is missing or of \
               another type than `transformers` writes.",
        example: "A config without `hidden_size`.",
        fix: "Take the config.json of the model's folder on the hub, as it is.",
    },
    Code {
        code: "PL0781",
        title: "a kind of model that is not known",
        text: "`model_type` of the config names an architecture that `planc import hf` has no rules for. \
               Guessing from similar field names would train another model than the one published.",
        example: "model_type: \"mixtral\".",
        fix: "Write the model.ron by hand (docs/model.md), if its modules suffice.",
    },
    Code {
        code: "PL0782",
        title: "a config that asks for what planc does not have",
        text: "The field is known, and its value changes what the model computes in a way that model.ron \
               cannot say: a sliding window within a sequence, scaling of rotations of another kind, \
               attention to another sequence, quantized weights.",
        example: "rope_scaling: {\"type\": \"yarn\"}.",
        fix: "Do as the report says, if it names a way; else another model.",
    },
    Code {
        code: "PL0783",
        title: "an unknown field of a config",
        text: "planc knows which fields of a config change what is computed and which do not. One that is \
               neither may change the model, so it is not ignored.",
        example: "A config with \"logit_softcapping\": 30.0.",
        fix: "If the field changes nothing of what is computed, remove it from a copy of the config.",
    },
    Code {
        code: "PL0784",
        title: "weights that do not fit the model",
        text: "Parameters are missing, tensors are no parameters, or shapes or types differ. The report \
               lists all of them. 16-bit floats become f32 without being asked, since no value changes.",
        example: "The weights of Llama-3-8B for a model.ron with 31 layers.",
        fix: "Use the model that the weights are of; or permit it: --allow-missing, --allow-unexpected, \
              --cast. --prefix and --map say how keys are to be read.",
    },
    Code {
        code: "PL0785",
        title: "a mapping that cannot be used",
        text: "A file given with `--map` is no mapping, or a rule of it cannot be read backwards: its keys \
               and its parameters must have the same {holes}.",
        example: "Map(from: \"h.{layer}.w\", to: [\"w\"]).",
        fix: "Correct the rule. docs/checkpoints.md describes mappings.",
    },
    Code {
        code: "PL0786",
        title: "rows in the order of unknown ranks",
        text: "TransformerEngine's gated fc1 holds, rank by rank of the tensor-parallel group, that rank's \
               rows of the gate and then of the up projection. Gathered, their order depends on how many \
               ranks there were, which the file does not say. A wrong guess loads without an error and \
               computes something else.",
        example: "planc ckpt import te weights.safetensors of a model with swiglu.",
        fix: "Add --saved-tp N; 1 if there was no tensor parallelism.",
    },
    Code {
        code: "PL0787",
        title: "tied weights that differ",
        text: "The model ties two parameters, and the checkpoint has a tensor for each, with different \
               values. Only one of them could be kept.",
        example: "lm_head.weight was trained apart from the embedding.",
        fix: "Remove the tie from the model, or the wrong tensor from the checkpoint.",
    },
    Code {
        code: "PL0788",
        title: "a model whose files are not all there",
        text: "model.safetensors.index.json names tensors that none of the files beside it has.",
        example: "A download that was interrupted.",
        fix: "Get the missing files.",
    },
    Code {
        code: "PL0789",
        title: "a value that the format cannot hold",
        text: "The checkpoint has something that has no place in the format to be written: a type that \
               safetensors does not know, or a Python object that is no literal.",
        example: "A complex tensor.",
        fix: "Remove it from the checkpoint, or copy the checkpoint as it is.",
    },
    Code {
        code: "PL0790",
        title: "an output folder that is not empty",
        text: "Files of another model beside the new ones would be read as parts of it.",
        example: "planc ckpt export hf ckpt/ -o old_model/.",
        fix: "Name a new folder, or empty it.",
    },
    Code {
        code: "PL0791",
        title: "output that would replace what is there",
        text: "`planc ckpt` writes over no file and no checkpoint unasked, lets `latest` not go back to an \
               older step, since a run would go on from there, and writes nothing into a checkpoint.",
        example: "planc ckpt import full full.safetensors -o ckpt, where ckpt has that step.",
        fix: "Name another place. `--force` replaces a regular file or a checkpoint.",
    },
];
