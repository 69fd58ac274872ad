//! `RunError`: why a plan cannot be run, or stopped running.
//!
//! Values, not text: the CLI turns them into reports and finds [`RunError::code`] in its table.
//! Errors are `Clone`, since one that ends a session is the answer to every later call.

use std::path::{Path, PathBuf};

use ::checkpoint::{CheckpointError, StoredType};
use ir::checkpoint::LayoutError;
use ir::plan::PlanSection;

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RunError {
    /// More ranks than threads make sense for.
    #[error(
        "mesh ({mesh}) has {ranks} ranks, and this machine runs at most {max} as threads; compile for a \
         smaller mesh to run it here"
    )]
    TooManyRanks {
        /// The mesh: `dp=1000, tp=1000`.
        mesh: String,
        /// Its ranks.
        ranks: u64,
        /// The limit.
        max: u64,
    },
    /// The arenas of all ranks do not fit into memory.
    #[error(
        "{ranks} ranks of {} each need {}, and this machine has {}; use a smaller mesh, model or batch",
        bytes(*per_rank), bytes(*total), bytes(*physical)
    )]
    OutOfMemory {
        /// Ranks of the mesh.
        ranks: u64,
        /// Bytes of both arenas of one rank.
        per_rank: u64,
        /// Bytes of all.
        total: u64,
        /// Bytes of this machine.
        physical: u64,
    },
    /// The plan contradicts itself: a bug of the compiler, or an edited file.
    #[error("the plan is broken: `{what}` {why}; compile it again")]
    BadPlan {
        /// A buffer, an instruction, a communicator.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// An instruction failed on one rank, which ends all of them.
    #[error("rank {rank} ({coord}), {at}: {cause}")]
    Rank {
        /// The rank that failed first.
        rank: u64,
        /// Its coordinate: `dp=1, tp=0`.
        coord: String,
        /// What it was doing: `` step[12] `matmul` making `h` ``.
        at: String,
        /// What happened.
        cause: Box<RunError>,
    },
    /// A panic, caught at the edge of a rank's thread.
    #[error("panicked: {message}")]
    Panic {
        /// The panic's message.
        message: String,
    },
    /// Another rank failed first; that error is the one to report.
    #[error("stopped because another rank failed")]
    Stopped,
    /// A rank's thread could not be started.
    #[error("cannot start a thread for rank {rank}: {why}; use a smaller mesh")]
    Thread {
        /// The rank.
        rank: u64,
        /// What the system says.
        why: String,
    },
    /// An integer that f32 cannot carry.
    #[error("`{buffer}` holds {value}, beyond the integers up to 2^24 that f32 carries exactly")]
    NotExact {
        /// The buffer.
        buffer: String,
        /// The value.
        value: i64,
    },
    /// An op made a fraction where its result is an integer.
    #[error("`{buffer}` holds integers and was given {value}")]
    NotInteger {
        /// The buffer.
        buffer: String,
        /// The value.
        value: f32,
    },
    /// An op left an element of its result as it was.
    #[error("element {element} of `{buffer}` was not written")]
    Unwritten {
        /// The buffer.
        buffer: String,
        /// The first such element, in the local buffer.
        element: usize,
    },
    /// An op left something other than zero beyond what a shard holds.
    #[error("element {element} of `{buffer}` is padding, and was given {value} instead of 0")]
    Padding {
        /// The buffer.
        buffer: String,
        /// The first such element, in the local buffer.
        element: usize,
        /// What it was given.
        value: f32,
    },
    /// Ranks of one group came to different collectives.
    #[error("instruction {ours} of one rank meets instruction {theirs} of another")]
    Diverged {
        /// This rank's instruction.
        ours: String,
        /// That of those that came first.
        theirs: String,
    },
    /// No driver, hence no GPU.
    #[error(
        "this machine has no NVIDIA driver: the loader finds no libcuda.so.1 (nor in LD_LIBRARY_PATH); \
         install the driver, or run with `--device cpu`"
    )]
    NoDriver,
    /// A GPU that is not there.
    #[error(
        "GPU {ordinal} does not exist, this process sees {devices}; start fewer ranks on this machine, or \
         see what CUDA_VISIBLE_DEVICES hides"
    )]
    NoDevice {
        /// The number that was asked for.
        ordinal: u32,
        /// How many there are.
        devices: u32,
    },
    /// A library of NVIDIA's that is not there, or does not load.
    #[error(
        "{library} was not {} (looked in {}); `pip install {package}`, or add its folder to \
         LD_LIBRARY_PATH",
        why.as_ref().map_or("found".to_string(), |it| format!("loaded: {it}")), list(&paths(looked))
    )]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
        /// The wheel on PyPI that has it.
        package: &'static str,
        /// Where it was looked for.
        looked: Vec<PathBuf>,
        /// What the loader says, if there is such a file.
        why: Option<String>,
    },
    /// A library of another version.
    #[error(
        "`{}` has no function `{function}`: {why}; install the version that `planc doctor` names",
        path.display()
    )]
    LibraryFunction {
        /// The library.
        path: PathBuf,
        /// What it lacks.
        function: String,
        /// What the loader says.
        why: String,
    },
    /// A call of NVIDIA's that failed.
    #[error("{call} failed: {status}")]
    Cuda {
        /// The function.
        call: &'static str,
        /// What it returned, and said.
        status: String,
    },
    /// A GPU without enough free memory.
    #[error(
        "the GPU has no {} of free memory; use a larger mesh, a smaller batch, or checkpointing",
        bytes(*needed)
    )]
    OutOfDeviceMemory {
        /// Bytes that were asked for.
        needed: u64,
    },
    /// An op that the GPU has no kernel for.
    #[error("no kernel runs `{op}` on a GPU: {why}; run with `--device cpu`")]
    NoKernel {
        /// The op.
        op: String,
        /// What is not supported.
        why: String,
    },
    /// One of our kernels that NVRTC does not take.
    #[error("NVRTC does not compile `{function}` for {arch}: {log}")]
    Compile {
        /// Its source and entry.
        function: String,
        /// The GPU's architecture.
        arch: String,
        /// What NVRTC says.
        log: String,
    },
    /// No end of a section in sight.
    #[error(
        "nothing moved for {seconds} s while {} ran: {}; a rank is stuck or gone (its own message says \
         why), or the work takes longer than the timeout (PLANC_TIMEOUT_S)",
        section.name(), streams.join("; ")
    )]
    Stuck {
        /// How long.
        seconds: u64,
        /// Of which section.
        section: PlanSection,
        /// How far each stream had come.
        streams: Vec<String>,
    },
    /// The GPU gave up. It does not say which instruction it was.
    #[error(
        "the GPU stopped while {} ran: {status}; {}; run with PLANC_CUDA_SYNC=1 to have the instruction \
         named",
        section.name(), streams.join("; ")
    )]
    DeviceFault {
        /// What the driver says.
        status: String,
        /// The section.
        section: PlanSection,
        /// How far each stream had come.
        streams: Vec<String>,
    },
    /// What says which rank this process is, and does not say all of it.
    #[error(
        "{by} says which rank this process is, but not {}; give all of {}",
        missing.join(", "), all.join(", ")
    )]
    LaunchMissing {
        /// The flags, torchrun or Slurm.
        by: &'static str,
        /// What is not given.
        missing: Vec<&'static str>,
        /// What must be given.
        all: Vec<&'static str>,
    },
    /// What says which rank this process is, and cannot be so.
    #[error("{name} is `{value}`, which {why}")]
    LaunchValue {
        /// A flag or a variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it, and what would fix it.
        why: String,
    },
    /// Not as many processes as the mesh has ranks.
    #[error(
        "{by} says that there are {world_size} processes, and mesh ({mesh}) has {ranks} ranks; start \
         {ranks}, or use a mesh of {world_size}"
    )]
    WorldSize {
        /// The flags, torchrun or Slurm.
        by: &'static str,
        /// Its ranks.
        world_size: u64,
        /// The mesh: `dp=2, tp=4`.
        mesh: String,
        /// Its ranks.
        ranks: u64,
    },
    /// Ranks that cannot reach each other.
    #[error("the ranks cannot meet at {master}: {why}")]
    Rendezvous {
        /// `host:port`.
        master: String,
        /// What went wrong, and what would fix it.
        why: String,
    },
    /// A secret of the job that is none.
    #[error("the job secret of {from} {why}")]
    JobSecret {
        /// `PLANC_JOB_SECRET`, or a file.
        from: String,
        /// The mistake and its remedy; never the secret.
        why: String,
    },
    /// A rank without a plan to run.
    #[error("{message}")]
    NoPlan {
        /// The code of what is wrong with it.
        code: &'static str,
        /// What is wrong.
        message: String,
        /// Whether it is our mistake.
        bug: bool,
    },
    /// Ranks that were not started alike.
    #[error("{who}: {}; start all ranks with the same program, model and options", differences.join(", "))]
    RanksDiffer {
        /// `` rank 3 (node7) and rank 0 (node1) differ ``.
        who: String,
        /// `` plan 6f12 and 8a03 ``.
        differences: Vec<String>,
    },
    /// A process of the run that is gone.
    #[error("rank {rank} ({host}) {how}; its own output may say why")]
    RankGone {
        /// The rank.
        rank: u64,
        /// Where it ran.
        host: String,
        /// `ended without a word`, `has been silent for 60 s`.
        how: String,
    },
    /// What a rank in another process failed with.
    #[error("{message}")]
    Remote {
        /// The code of what happened there.
        code: &'static str,
        /// Its message, which names the rank.
        message: String,
        /// Whether it is our mistake.
        bug: bool,
    },
    /// A failure, with where every rank was when it happened.
    #[error("{cause}; when it ended: {}", ranks.join("; "))]
    Positions {
        /// What happened.
        cause: Box<RunError>,
        /// `` ranks 0, 2-3 at step[12] `matmul` making `h` ``.
        ranks: Vec<String>,
    },
    /// A global tensor that this process has only a part of.
    #[error(
        "`{name}` is spread over processes, and this one has rank {rank} only; use one process"
    )]
    NotHere {
        /// The buffer.
        name: String,
        /// The rank that is here.
        rank: u64,
    },
    /// A name that is no buffer.
    #[error("the plan has no buffer `{name}`; see `planc inspect`")]
    UnknownBuffer {
        /// The name.
        name: String,
    },
    /// A temporary, which holds nothing between sections.
    #[error("`{name}` is a temporary, which holds nothing between sections")]
    NotPersistent {
        /// The buffer.
        name: String,
    },
    /// Not as many values as the tensor has.
    #[error("`{name}` has {expected} elements, and {found} were given")]
    Elements {
        /// The buffer, or `tokens` or `labels` of a batch.
        name: String,
        /// What it has.
        expected: u64,
        /// What there is.
        found: u64,
    },
    /// An input that no data source fills.
    #[error(
        "input `{name}` is none that data can fill (tokens, labels, lr, seed); write it through \
         the library, or name the model's inputs so"
    )]
    UnknownInput {
        /// The buffer.
        name: String,
    },
    /// Too many steps in a row with a loss, or a norm of gradients, that is not finite.
    #[error(
        "the loss or the norm of the gradients is not finite in step {step}{}; weights and states are those of the \
         last step that was applied: resume from a checkpoint with a lower learning rate or with other data, or allow \
         more such steps by `--on-nonfinite skip --max-nonfinite N`",
        in_a_row_text(*in_a_row)
    )]
    Nonfinite {
        /// The last of them, from 1.
        step: u64,
        /// The number of such steps since the last step that was applied.
        in_a_row: u64,
    },
    /// A file that cannot be read or written.
    #[error("cannot {doing} `{}`: {why}", path.display())]
    Io {
        /// `read` or `write`.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        why: String,
    },
    /// A file that is not what its name says.
    #[error("`{}` is not {expected}: {why}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// `a safetensors file`.
        expected: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// Data for less than one step.
    #[error(
        "`{file}` has {found} tokens, and one step needs {needed} (a batch of {batch} sequences of \
         {sequence} and the next token); give more data, or compile with a smaller batch or sequence"
    )]
    DataTooShort {
        /// The file or files.
        file: String,
        /// Tokens found.
        found: u64,
        /// Tokens needed.
        needed: u64,
        /// Sequences a step.
        batch: u64,
        /// Tokens a sequence.
        sequence: u64,
    },
    /// Data of fixed steps, all used.
    #[error(
        "`{file}` holds {held} steps, and step {step} was asked for; run with `--steps {held}`"
    )]
    DataExhausted {
        /// The file or files.
        file: String,
        /// Steps that it holds.
        held: u64,
        /// The step asked for, from 1.
        step: u64,
    },
    /// A tensor of tokens that does not fit the model.
    #[error(
        "`{}`: `tokens` is {found:?}, and this model needs [N, {row}] or [steps, {batch}, {row}] (a row \
         is a sequence and the next token)", path.display()
    )]
    DataShape {
        /// The file.
        path: PathBuf,
        /// Its shape.
        found: Vec<usize>,
        /// Tokens of a row: sequence + 1.
        row: u64,
        /// Sequences a step.
        batch: u64,
    },
    /// Files that cannot be joined to one stream of samples.
    #[error(
        "`{}` and `{}` are of different kinds (token stream, rows, steps); give files of one kind",
        first.display(), second.display()
    )]
    DataKinds {
        /// The first file.
        first: PathBuf,
        /// The first that differs from it.
        second: PathBuf,
    },
    /// A token that the model has no embedding for.
    #[error(
        "`{file}`, position {position}: token {token} is outside the vocabulary of {vocab}; use the \
         tokenizer that the model was made for, or a larger vocabulary"
    )]
    TokenOutsideVocab {
        /// The file.
        file: String,
        /// Index of the token in the file, or in the batch if there is no file.
        position: u64,
        /// The token.
        token: i64,
        /// Size of the vocabulary.
        vocab: u64,
    },
    /// Data that a checkpoint was not trained on.
    #[error(
        "checkpoint `{}` was trained on other data: {}; give the files that it was trained on with `--data`, \
         under whatever path, or add `--change-data` to go on with other data",
        path.display(), list(differences)
    )]
    DataDiffers {
        /// The checkpoint.
        path: PathBuf,
        /// `` `b.bin` has 10 bytes, and `a.bin` had 20 ``.
        differences: Vec<String>,
    },
    /// Names of weights and of parameters do not agree.
    #[error(
        "{}: {}; give a file whose names are those of the model (`planc inspect` lists them)",
        list(&paths(files)), mismatch(missing, unexpected)
    )]
    WeightNames {
        /// The files.
        files: Vec<PathBuf>,
        /// Parameters that no file has.
        missing: Vec<String>,
        /// Tensors that are no parameter.
        unexpected: Vec<String>,
    },
    /// Tensors of other shapes than the parameters.
    #[error(
        "weights have other shapes than the model: {}; give the weights of this model or change its \
         sizes",
        list(tensors)
    )]
    WeightShapes {
        /// `` `name` is [2, 3] and must be [3, 2] ``.
        tensors: Vec<String>,
    },
    /// A tensor of an element type that is no weight.
    #[error("`{name}` in `{}` is {dtype}; weights are F32, BF16, F16 or F64", path.display())]
    WeightDType {
        /// The tensor.
        name: String,
        /// The file.
        path: PathBuf,
        /// Its element type.
        dtype: String,
    },
    /// One tensor comes twice, and not with the same values.
    #[error(
        "`{first}` and `{second}` are one tensor in this model, and the weights differ; remove one of \
         them from the file, or do not tie them"
    )]
    WeightsDiffer {
        /// The name that is read.
        first: String,
        /// The other.
        second: String,
    },
    /// A checkpoint that cannot be read or written.
    #[error("{0}")]
    Checkpoint(Box<CheckpointError>),
    /// A plan whose state cannot be saved.
    #[error("{0}")]
    Layout(LayoutError),
    /// A checkpoint that was not completed. Those before it are as they were.
    #[error("checkpoint `{}` was not saved: rank {rank}: {why}", path.display())]
    NotSaved {
        /// Where it would be.
        path: PathBuf,
        /// The rank that could not write.
        rank: u64,
        /// Its error, which names the file.
        why: String,
    },
    /// A folder to save into that another run has saved into.
    #[error(
        "`{0}` holds checkpoints of another run, up to step {step}; add `--load {0}` to go on from it, name \
         another folder, or `--overwrite` to start anew in it",
        path.display()
    )]
    FolderInUse {
        /// The folder.
        path: PathBuf,
        /// The newest of its checkpoints.
        step: u64,
    },
    /// A checkpoint that is not of this plan.
    #[error("checkpoint `{}` does not fit the plan: {}; {}", path.display(), listed(problems), fix(path, problems))]
    LoadMismatch {
        /// The checkpoint.
        path: PathBuf,
        /// All that differs.
        problems: Vec<LoadProblem>,
    },
}

/// One thing in which a checkpoint and a plan differ.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadProblem {
    /// The checkpoint lacks it.
    #[error("missing: `{key}`")]
    Missing {
        /// Its key.
        key: String,
    },
    /// The checkpoint has tensors, and none is called as a parameter of the plan is.
    #[error(
        "no tensor has the name of a parameter: they are called like `{found}`, and must be called like `{expected}`"
    )]
    Foreign {
        /// The key of one of its tensors.
        found: String,
        /// The key of a parameter.
        expected: String,
    },
    /// The checkpoint is one of weights.
    #[error(
        "the checkpoint has no state of an optimizer; add `--allow-missing 'optim.*'` to load weights alone"
    )]
    NoOptimizer,
    /// The plan lacks it.
    #[error("unexpected: `{key}`")]
    Unexpected {
        /// Its key.
        key: String,
    },
    /// Other sizes.
    #[error("shape: `{key}` is {found:?} and must be {expected:?}")]
    Shape {
        /// Its key.
        key: String,
        /// Sizes in the checkpoint.
        found: Vec<u64>,
        /// Sizes in the plan.
        expected: Vec<u64>,
    },
    /// Another element type.
    #[error(
        "type: `{key}` is {found} and must be {expected}{}",
        if *can_cast { " (--cast rounds it)" } else { "" }
    )]
    Type {
        /// Its key.
        key: String,
        /// Type in the checkpoint.
        found: StoredType,
        /// Type in the plan.
        expected: StoredType,
        /// Whether one can be rounded to the other.
        can_cast: bool,
    },
    /// What should count steps or samples.
    #[error("`{key}` is {found} and must be a count, from 0 to 2^53")]
    Count {
        /// Its key.
        key: String,
        /// What it is.
        found: String,
    },
    /// What should be one number.
    #[error("`{key}` is {found} and must be one number")]
    Number {
        /// Its key.
        key: String,
        /// What it is.
        found: String,
    },
}

/// What to do about a checkpoint that does not fit.
fn fix(path: &Path, problems: &[LoadProblem]) -> String {
    match problems.iter().any(|it| matches!(it, LoadProblem::Foreign { .. })) {
        true => format!(
            "make a checkpoint of its weights with `planc ckpt import hf {} --model MODEL.ron -o DIR`, and where names \
             differ with `--rename FROM=TO`, as in \
             `--rename 'layers.*.attention.wq.weight=model.layers.*.self_attn.q_proj.weight'`",
            path.display()
        ),
        false => {
            "load it with the model that it was saved with, or permit it with --allow-missing, \
                  --allow-unexpected or --cast"
                .to_string()
        }
    }
}

/// How many problems of one kind are listed.
const OF_A_KIND: usize = 10;

/// `2 missing, 1 unexpected`, and a line for each, up to [`OF_A_KIND`] of a kind.
fn listed(problems: &[LoadProblem]) -> String {
    let kind = |it: &LoadProblem| match it {
        LoadProblem::Foreign { .. } => "of other names",
        LoadProblem::NoOptimizer => "without an optimizer's state",
        LoadProblem::Missing { .. } => "missing",
        LoadProblem::Unexpected { .. } => "unexpected",
        LoadProblem::Shape { .. } => "of another shape",
        LoadProblem::Type { .. } => "of another type",
        LoadProblem::Count { .. } | LoadProblem::Number { .. } => "no number",
    };
    let mut kinds: Vec<(&str, Vec<&LoadProblem>)> = Vec::new();
    for problem in problems {
        match kinds.iter_mut().find(|it| it.0 == kind(problem)) {
            Some((_, those)) => those.push(problem),
            None => kinds.push((kind(problem), vec![problem])),
        }
    }
    let counts: Vec<String> = kinds
        .iter()
        .map(|(kind, those)| match those[0] {
            LoadProblem::NoOptimizer | LoadProblem::Foreign { .. } => kind.to_string(),
            _ => format!("{} {kind}", those.len()),
        })
        .collect();
    let mut res = counts.join(", ");
    for (kind, those) in kinds {
        those.iter().take(OF_A_KIND).for_each(|it| res.push_str(&format!("\n{it}")));
        if let Some(more) = those.len().checked_sub(OF_A_KIND).filter(|&it| it > 0) {
            res.push_str(&format!("\nand {more} more {kind}"));
        }
    }
    res
}

impl From<CheckpointError> for RunError {
    fn from(it: CheckpointError) -> RunError {
        RunError::Checkpoint(Box::new(it))
    }
}

impl From<LayoutError> for RunError {
    fn from(it: LayoutError) -> RunError {
        RunError::Layout(it)
    }
}

impl RunError {
    /// A stable name for `planc explain`.
    pub fn code(&self) -> &'static str {
        match self {
            RunError::TooManyRanks { .. } => "PL0502",
            RunError::OutOfMemory { .. } => "PL0503",
            RunError::BadPlan { .. } => "PL0504",
            // What happened matters, not where.
            RunError::Rank { cause, .. } => cause.code(),
            RunError::Panic { .. } => "PL0505",
            RunError::Stopped => "PL0506",
            RunError::Thread { .. } => "PL0507",
            RunError::NotExact { .. } => "PL0508",
            RunError::NotInteger { .. } => "PL0509",
            RunError::Unwritten { .. } => "PL0510",
            RunError::Padding { .. } => "PL0511",
            RunError::Diverged { .. } => "PL0512",
            RunError::NoDriver => "PL0540",
            RunError::NoDevice { .. } => "PL0541",
            RunError::LibraryMissing { .. } => "PL0542",
            RunError::LibraryFunction { .. } => "PL0543",
            RunError::Cuda { .. } => "PL0544",
            RunError::OutOfDeviceMemory { .. } => "PL0545",
            RunError::NoKernel { .. } => "PL0546",
            RunError::Compile { .. } => "PL0550",
            RunError::Stuck { .. } => "PL0551",
            RunError::DeviceFault { .. } => "PL0552",
            RunError::LaunchMissing { .. } => "PL0560",
            RunError::LaunchValue { .. } => "PL0561",
            RunError::WorldSize { .. } => "PL0562",
            RunError::Rendezvous { .. } => "PL0563",
            RunError::RanksDiffer { .. } => "PL0564",
            RunError::RankGone { .. } => "PL0565",
            RunError::Remote { code, .. } | RunError::NoPlan { code, .. } => code,
            RunError::Positions { cause, .. } => cause.code(),
            RunError::NotHere { .. } => "PL0566",
            RunError::JobSecret { .. } => "PL0567",
            RunError::UnknownBuffer { .. } => "PL0513",
            RunError::NotPersistent { .. } => "PL0514",
            RunError::Elements { .. } => "PL0515",
            RunError::UnknownInput { .. } => "PL0516",
            RunError::Nonfinite { .. } => "PL0517",
            RunError::Io { .. } => "PL0520",
            RunError::BadFile { .. } => "PL0521",
            RunError::DataTooShort { .. } => "PL0522",
            RunError::DataExhausted { .. } => "PL0523",
            RunError::DataShape { .. } => "PL0524",
            RunError::DataKinds { .. } => "PL0525",
            RunError::TokenOutsideVocab { .. } => "PL0526",
            RunError::DataDiffers { .. } => "PL0527",
            RunError::WeightNames { .. } => "PL0530",
            RunError::WeightShapes { .. } => "PL0531",
            RunError::WeightDType { .. } => "PL0532",
            RunError::WeightsDiffer { .. } => "PL0533",
            RunError::Checkpoint(it) => it.code(),
            RunError::Layout(_) => "PL0750",
            RunError::NotSaved { .. } => "PL0751",
            RunError::LoadMismatch { .. } => "PL0752",
            RunError::FolderInUse { .. } => "PL0755",
        }
    }

    /// Whether nothing moved, so that where the ranks were is what may say why.
    pub fn is_stall(&self) -> bool {
        // Also where it comes from another process, which sends the code.
        self.code() == "PL0551"
    }

    /// Whether it is our mistake and not the user's.
    pub fn is_bug(&self) -> bool {
        match self {
            RunError::Rank { cause, .. } | RunError::Positions { cause, .. } => cause.is_bug(),
            RunError::Remote { bug, .. } | RunError::NoPlan { bug, .. } => *bug,
            RunError::Panic { .. }
            | RunError::Stopped
            | RunError::NotInteger { .. }
            | RunError::Unwritten { .. }
            | RunError::Padding { .. }
            | RunError::Compile { .. }
            | RunError::Diverged { .. } => true,
            RunError::TooManyRanks { .. }
            | RunError::OutOfMemory { .. }
            | RunError::BadPlan { .. }
            | RunError::Thread { .. }
            | RunError::NotExact { .. }
            | RunError::NoDriver
            | RunError::NoDevice { .. }
            | RunError::LibraryMissing { .. }
            | RunError::LibraryFunction { .. }
            | RunError::Cuda { .. }
            | RunError::OutOfDeviceMemory { .. }
            | RunError::NoKernel { .. }
            | RunError::Stuck { .. }
            | RunError::DeviceFault { .. }
            | RunError::LaunchMissing { .. }
            | RunError::LaunchValue { .. }
            | RunError::WorldSize { .. }
            | RunError::Rendezvous { .. }
            | RunError::JobSecret { .. }
            | RunError::RanksDiffer { .. }
            | RunError::RankGone { .. }
            | RunError::NotHere { .. }
            | RunError::UnknownBuffer { .. }
            | RunError::NotPersistent { .. }
            | RunError::Elements { .. }
            | RunError::UnknownInput { .. }
            | RunError::Nonfinite { .. }
            | RunError::Io { .. }
            | RunError::BadFile { .. }
            | RunError::DataTooShort { .. }
            | RunError::DataExhausted { .. }
            | RunError::DataShape { .. }
            | RunError::DataKinds { .. }
            | RunError::TokenOutsideVocab { .. }
            | RunError::DataDiffers { .. }
            | RunError::WeightNames { .. }
            | RunError::WeightShapes { .. }
            | RunError::WeightDType { .. }
            | RunError::WeightsDiffer { .. }
            | RunError::Checkpoint(_)
            | RunError::Layout(_)
            | RunError::NotSaved { .. }
            | RunError::LoadMismatch { .. }
            | RunError::FolderInUse { .. } => false,
        }
    }

    pub(crate) fn bad_plan(what: impl Into<String>, why: impl Into<String>) -> RunError {
        RunError::BadPlan { what: what.into(), why: why.into() }
    }

    pub(crate) fn read(path: &Path, error: &std::io::Error) -> RunError {
        RunError::Io { doing: "read", path: path.to_path_buf(), why: error.to_string() }
    }

    pub(crate) fn write(path: &Path, error: &std::io::Error) -> RunError {
        RunError::Io { doing: "write", path: path.to_path_buf(), why: error.to_string() }
    }
}

/// How many names an error lists before it counts.
const LISTED: usize = 5;

fn in_a_row_text(in_a_row: u64) -> String {
    match in_a_row {
        1 => String::new(),
        n => format!(", the last of {n} such steps in a row"),
    }
}

/// `a, b, c, d, e and 12 more`.
fn list(names: &[String]) -> String {
    let shown = names.iter().take(LISTED).cloned().collect::<Vec<String>>().join(", ");
    match names.len().saturating_sub(LISTED) {
        0 => shown,
        rest => format!("{shown} and {rest} more"),
    }
}

/// `3 missing (a, b, c), 1 unexpected (x)`.
fn mismatch(missing: &[String], unexpected: &[String]) -> String {
    let part = |what: &str, names: &[String]| match names.len() {
        0 => None,
        n => Some(format!("{n} {what} ({})", list(names))),
    };
    let parts = [part("missing", missing), part("unexpected", unexpected)];
    parts.into_iter().flatten().collect::<Vec<String>>().join(", ")
}

fn paths(files: &[PathBuf]) -> Vec<String> {
    files.iter().map(|it| format!("`{}`", it.display())).collect()
}

/// `1.5 GiB`.
fn bytes(n: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} bytes") } else { format!("{value:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_names_are_counted() {
        let missing = (0..8).map(|it| format!("w{it}")).collect();
        let error = RunError::WeightNames {
            files: vec!["a.safetensors".into()],
            missing,
            unexpected: vec!["x".to_string()],
        };
        assert_eq!(
            error.to_string(),
            "`a.safetensors`: 8 missing (w0, w1, w2, w3, w4 and 3 more), 1 unexpected (x); give a file \
             whose names are those of the model (`planc inspect` lists them)"
        );
    }

    #[test]
    fn sizes_are_readable() {
        assert_eq!(bytes(12), "12 bytes");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
    }

    /// A failure on a rank keeps the code of its cause.
    #[test]
    fn a_rank_reports_the_code_of_its_cause() {
        let cause = RunError::NotExact { buffer: "ids".into(), value: 1 << 25 };
        let error = RunError::Rank {
            rank: 3,
            coord: "tp=3".into(),
            at: "step[1] `add` making `y`".into(),
            cause: Box::new(cause),
        };
        assert_eq!(error.code(), "PL0508");
        assert_eq!(
            error.to_string(),
            "rank 3 (tp=3), step[1] `add` making `y`: `ids` holds 33554432, beyond the integers up to \
             2^24 that f32 carries exactly"
        );
    }
}
