//! What commands read: a model, IR, or a plan. And how errors of the libraries become reports.

use std::fs;
use std::io::{self, IsTerminal, Read};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use codegen::Proved;
use ir::model::{At, MeshSpec, Model, ModelError, axes_text};
use ir::plan::Plan;
use ir::text::{ParseError, Program};
use ir::verify::{Place, Proof, VerifyError};
use ir::{Digest, Graph};
use passes::{PassError, Verification};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};

use crate::report::{Failure, Outcome, Ui, print_aside, warning};
use crate::table;
use crate::variants::Variant;

/// Options of everything that takes a model.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ModelArgs {
    /// The mesh: `8`, `2x4`, `2x2x2`, with the axis names that the model has for so many axes, or
    /// `dp=2,tp=4`.
    #[arg(long, value_name = "MESH")]
    pub mesh: Option<String>,
    /// Replaces a value of the model, as in `precision.compute=bf16`.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    pub overrides: Vec<String>,
    /// How many FSDP units ahead weights are gathered in the forward pass: 0 gathers them when they
    /// are needed, more hides slower links and takes more memory. 1 by default.
    #[arg(long, value_name = "UNITS")]
    pub prefetch_forward: Option<u16>,
    /// The same for weights that the backward pass gathers again.
    #[arg(long, value_name = "UNITS")]
    pub prefetch_backward: Option<u16>,
}

impl ModelArgs {
    /// How to compile.
    pub fn options(&self) -> codegen::Options {
        let mut res = codegen::Options::default();
        let schedule = &mut res.schedule;
        let given = |it: Option<u16>, default: usize| it.map_or(default, usize::from);
        schedule.prefetch_forward = given(self.prefetch_forward, schedule.prefetch_forward);
        schedule.prefetch_backward = given(self.prefetch_backward, schedule.prefetch_backward);
        res
    }

    /// An option that has no meaning for a plan.
    fn of_schedule(&self) -> Option<&'static str> {
        let forward = self.prefetch_forward.map(|_| "--prefetch-forward");
        forward.or(self.prefetch_backward.map(|_| "--prefetch-backward"))
    }
}

/// What has a plan: the input of everything but `compile`.
#[derive(Debug, clap::Args)]
pub struct PlanArgs {
    /// A plan, or a model with `--mesh`.
    #[arg(value_name = "MODEL.plan|MODEL.ron")]
    pub input: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
}

impl PlanArgs {
    /// The plan in the file, compiled first if the file is a model or IR.
    pub fn plan(&self, ui: &Ui) -> Outcome<Proved> {
        plan(&self.input, &self.model, ui)
    }
}

/// The plan in a file, compiled first if the file is a model or IR.
pub fn plan(path: &Path, model: &ModelArgs, ui: &Ui) -> Outcome<Proved> {
    plan_in(&File::read(path)?, model, ui)
}

/// The same, of a file that has been read.
pub fn plan_in(file: &File<'_>, model: &ModelArgs, ui: &Ui) -> Outcome<Proved> {
    match file.input(model)? {
        Input::Plan(plan) => {
            file.tell_edited(&plan, ui);
            Ok(plan)
        }
        Input::Graph(graph, _) => match codegen::compile(*graph, &file.options(model)) {
            Ok(compiled) => Ok(compiled.plan),
            Err(it) => Err(file.pass_failure(&it.error)),
        },
    }
}

/// A file as text.
pub struct File<'a> {
    /// As the user wrote it.
    pub path: &'a Path,
    /// Its content.
    pub text: String,
}

/// What a file holds, ready to be compiled or run.
pub enum Input<P> {
    /// A model on a mesh, or IR.
    Graph(Box<Graph>, Duration),
    /// A plan.
    Plan(P),
}

impl File<'_> {
    /// Reads a file.
    pub fn read(path: &Path) -> Outcome<File<'_>> {
        let text = text(path, "name a model (.ron), a plan (.plan) or IR (.ir)")?;
        Ok(File { path, text })
    }

    /// Reads what it holds; a plan is proved.
    pub fn input(&self, args: &ModelArgs) -> Outcome<Input<Proved>> {
        match self.unproved(args)? {
            Input::Graph(graph, elaborate) => Ok(Input::Graph(graph, elaborate)),
            Input::Plan(plan) => match Proved::of(plan) {
                Ok(plan) => Ok(Input::Plan(plan)),
                Err(proof) => Err(self.broken(&proof.broken[0], proof.broken.len() - 1)),
            },
        }
    }

    /// Warns if a plan's text was edited after planc wrote it.
    pub fn tell_edited(&self, plan: &Plan, ui: &Ui) {
        let (path, digest) = (self.path.display(), Digest::of_plan(plan));
        let message = match ir::text::stated_digest(&self.text) {
            Some(stated) if stated != digest => format!(
                "`{path}` was edited after planc wrote it: it says that its digest is {stated}, and that is {digest}"
            ),
            _ if plan.model.is_none() && ir::text::states_model(&self.text) => format!(
                "`{path}` has no `digest` line that its `model` line belongs to, so it was edited after planc \
                 wrote it, and the digest of its model is not known"
            ),
            _ => return,
        };
        print_aside(&warning(ui, None, &message));
    }

    /// An error with the first counterexample, if there is one.
    pub fn check_proof(&self, proof: &Proof) -> Outcome {
        match &proof.broken[..] {
            [first, rest @ ..] => Err(self.broken(first, rest.len())),
            [] => Ok(()),
        }
    }

    /// Reads what it holds, and takes a plan as it is. Text that starts as a program is one, whatever the
    /// file is called.
    pub fn unproved(&self, args: &ModelArgs) -> Outcome<Input<Plan>> {
        if !self.is_program() {
            let start = Instant::now();
            let graph = self.model(args)?;
            return Ok(Input::Graph(Box::new(graph), start.elapsed()));
        }
        if let Some(it) = args.overrides.first() {
            let message = format!("`--set {it}` cannot change what is compiled already");
            let message = shortened(&message);
            return Err(Failure::new("PL0609", message).help("set it when you compile the model"));
        }
        let program = ir::text::parse(&self.text).map_err(|it| self.parse_failure(&it))?;
        let mesh = match &program {
            Program::Graph(graph) => &graph.mesh,
            Program::Plan(plan) => &plan.mesh,
        };
        if let Program::Graph(graph) = &program
            && let [first, rest @ ..] = &ir::verify::graph::verify(graph)[..]
        {
            return Err(self.broken(first, rest.len()));
        }
        self.check_mesh(mesh, args.mesh.as_deref())?;
        if let (Program::Plan(_), Some(it)) = (&program, args.of_schedule()) {
            let message = format!("`{it}` cannot change what is compiled already");
            return Err(Failure::new("PL0609", message).help("give it when you compile the model"));
        }
        Ok(match program {
            Program::Graph(graph) if graph.phase != ir::Phase::Logical => {
                let message =
                    format!("`{}` is past the phase that compiling starts at", self.path.display());
                return Err(
                    Failure::new("PL0609", message).help("use what `--emit logical` prints")
                );
            }
            Program::Graph(graph) => Input::Graph(Box::new(graph), Duration::ZERO),
            Program::Plan(plan) => Input::Plan(plan),
        })
    }

    /// Whether it holds IR or a plan, not a model.
    pub fn is_program(&self) -> bool {
        let name = self.path.extension().and_then(|it| it.to_str()).unwrap_or_default();
        let mut lines = self.text.lines().map(str::trim_start);
        let first = lines.find(|it| !it.is_empty() && !it.starts_with(';'));
        let starts = first.is_some_and(|it| it.starts_with("graph ") || it.starts_with("plan "));
        starts || matches!(name, "plan" | "ir")
    }

    fn model(&self, args: &ModelArgs) -> Outcome<Graph> {
        let variant = self.variant(args)?;
        let failure = |it: ModelError| self.overridden_failure(&it, &args.overrides);
        ir::model::elaborate(&variant.model, &variant.mesh).map_err(failure)
    }

    /// The model with its mesh and options.
    pub fn variant(&self, args: &ModelArgs) -> Outcome<Variant> {
        let mesh = args.mesh.as_deref().ok_or_else(|| {
            let message = format!("`{}` is a model, and a model needs a mesh", self.path.display());
            Failure::new("PL0605", message)
                .help("add `--mesh 1` for one rank, `--mesh 8`, `--mesh 2x4` or `--mesh dp=2,tp=4`")
        })?;
        let model = self.parsed(args)?;
        let mesh = MeshSpec::parse(mesh).map_err(|it| self.model_failure(&it))?;
        Ok(Variant { model, mesh, options: self.options(args) })
    }

    /// Returns the options to compile the file with. A release build does not look for the pass that breaks a model,
    /// which tests do; IR may have been edited into what no test has.
    pub fn options(&self, args: &ModelArgs) -> codegen::Options {
        let verification = match cfg!(debug_assertions) || self.is_program() {
            true => Verification::EveryPass,
            false => Verification::EveryPhase,
        };
        codegen::Options { verification, ..args.options() }
    }

    /// The model, with what `--set` replaces.
    pub fn parsed(&self, args: &ModelArgs) -> Outcome<Model> {
        let failure = |it: ModelError| self.overridden_failure(&it, &args.overrides);
        ir::model::parse_with(&self.text, &overrides(&args.overrides)?).map_err(failure)
    }

    /// The error that a model has on any mesh: on one where each axis has one coordinate.
    pub fn own_failure(&self, model: &Model, args: &ModelArgs) -> Option<Box<Failure>> {
        let axes = model.meshes.values().next()?;
        let mesh = MeshSpec::Named(axes.iter().map(|it| (it.clone(), 1)).collect());
        let graph = match ir::model::elaborate(model, &mesh) {
            Ok(graph) => graph,
            Err(it) => return Some(self.overridden_failure(&it, &args.overrides)),
        };
        codegen::price(graph, &self.options(args), u64::MAX).err().map(|it| self.pass_failure(&it))
    }

    /// A plan or IR is for one mesh; `--mesh` may repeat it.
    fn check_mesh(&self, mesh: &ir::placement::Mesh, wanted: Option<&str>) -> Outcome {
        let Some(wanted) = wanted else { return Ok(()) };
        let spec = MeshSpec::parse(wanted).map_err(|it| self.model_failure(&it))?;
        let axes = mesh.user_axes();
        let same = match spec {
            MeshSpec::Sizes(sizes) => axes.iter().map(|it| it.1).eq(sizes),
            MeshSpec::Named(named) => {
                axes.iter().copied().eq(named.iter().map(|it| (it.0.as_str(), it.1)))
            }
        };
        if same {
            return Ok(());
        }
        let message = format!(
            "`{}` is for the mesh {}, not for {wanted}",
            self.path.display(),
            axes_text(axes, ",")
        );
        Err(Failure::new("PL0604", message)
            .help("leave out `--mesh`, or compile the model for the other mesh"))
    }

    /// The report of an error of the model; it points into the file where it can.
    pub fn model_failure(&self, error: &ModelError) -> Box<Failure> {
        let mut failure = Failure::new(error.code(), shortened(&error.to_string()));
        if let Some(help) = error.help() {
            failure = failure.help(shortened(&help));
        }
        match (&error.at, error.span(&self.text)) {
            (At::Mesh | At::Override(_), _) => failure,
            (At::Source { .. } | At::Path(_), Some(span)) => {
                failure.at(self.path, &self.text, span)
            }
            (At::Source { .. } | At::Path(_), None) => failure.in_file(self.path),
        }
    }

    /// The same, of a model with overrides: what one of them set is not what the file shows.
    fn overridden_failure(&self, error: &ModelError, overrides: &[String]) -> Box<Failure> {
        let At::Path(path) = &error.at else { return self.model_failure(error) };
        let sets = |it: &&String| {
            let set = it.split_once('=').map_or("", |it| it.0).trim();
            path.strip_prefix(set)
                .is_some_and(|rest| matches!(rest.chars().next(), None | Some('.' | '[')))
        };
        let Some(set) = overrides.iter().rev().find(sets) else { return self.model_failure(error) };
        let mut failure = self.model_failure(error);
        failure.message.push_str(&shortened(&format!(" (set by `--set {set}`)")));
        failure.in_file(self.path)
    }

    fn parse_failure(&self, error: &ParseError) -> Box<Failure> {
        let failure = Failure::new("PL0603", error.message.clone());
        let failure = failure.at(self.path, &self.text, error.span.clone());
        failure.help("the file was cut off or edited; compile the model again")
    }

    /// The report of a program that can be read and breaks a promise of its phase. Ours are verified
    /// after every pass, so somebody edited this one.
    fn broken(&self, first: &VerifyError, more: usize) -> Box<Failure> {
        let more = if more == 0 { String::new() } else { format!(", and {more} more") };
        let what = first.property.map_or(String::new(), |it| format!(" (`{}`)", it.name()));
        let message = format!("this program breaks a promise{what}: {first}{more}");
        let failure = Failure::new("PL0612", message);
        let failure = match line_of(&self.text, &first.place) {
            Some(span) => failure.at(self.path, &self.text, span),
            None => failure.in_file(self.path),
        };
        failure.help("the file was edited; compile the model again")
    }

    /// The report of an error of a pass, which knows the tensor or module at fault.
    pub fn pass_failure(&self, error: &PassError) -> Box<Failure> {
        match error {
            PassError::Failed { code, message, subject } => {
                let message = match subject {
                    Some(it) if !message.contains(it.as_str()) => format!("`{it}`: {message}"),
                    _ => message.clone(),
                };
                let failure = Failure::new(code, message);
                match subject.as_deref().and_then(|it| mentioned(&self.text, it)) {
                    Some(span) => failure.at(self.path, &self.text, span),
                    None => failure.in_file(self.path),
                }
            }
            PassError::Broke { passes, broken } if self.is_program() => {
                let pass = passes.last().copied().unwrap_or_default();
                let more = match broken.len() {
                    0 | 1 => String::new(),
                    n => format!("; and {} more", n - 1),
                };
                let first = broken.first().map_or("", String::as_str);
                Failure::new("PL0612", format!("`{pass}` refuses what this becomes: {first}{more}"))
                    .in_file(self.path)
                    .help(
                        "shardings and types of what belongs together must agree, as of a weight and its \
                         states; if the file was not edited, this is a mistake in planc",
                    )
            }
            PassError::Broke { .. } => Failure::bug(error.to_string()),
        }
    }
}

/// The largest text that planc reads, in bytes; a plan of 10,000 layers needs less than half of it. Without a limit,
/// a pipe could fill the memory.
const MAX_TEXT: u64 = 1 << 30;

/// The text in a file, or out of a pipe or a terminal. `expected` says which file to name.
pub fn text(path: &Path, expected: &str) -> Outcome<String> {
    let bytes = open(path, WRITER).and_then(|it| text_bytes(it, MAX_TEXT)).map_err(|it| {
        let why = reason(&it);
        let failure = Failure::new("PL0601", format!("cannot read `{}`: {why}", path.display()));
        match it.kind() {
            // The path exists, but it is no text file.
            io::ErrorKind::IsADirectory | io::ErrorKind::FileTooLarge | io::ErrorKind::Other => {
                failure.help(expected)
            }
            io::ErrorKind::TimedOut => failure.help("start first what writes to it"),
            _ => failure,
        }
    })?;
    String::from_utf8(bytes).map_err(|it| {
        let at = it.utf8_error().valid_up_to();
        let message = format!("`{}` is not UTF-8 text (at byte {at})", path.display());
        Failure::new("PL0602", message).help(expected)
    })
}

/// Seconds for which a named pipe may have nothing that writes to it.
const WRITER: i64 = 5;

/// Opens a file to read. A pipe without a writer is an error after so many seconds; a writer may take its time.
fn open(path: &Path, seconds: i64) -> io::Result<fs::File> {
    // Otherwise opening a named pipe waits for a writer.
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let mut file = fs::OpenOptions::new().read(true).custom_flags(nonblocking).open(path)?;
    if file.metadata()?.file_type().is_fifo() {
        let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
        let quiet = poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&timeout))? == 0;
        // Nothing can be read yet: that is an error where there is a writer, and the end where there is none.
        if quiet && file.read(&mut [0]).is_ok_and(|it| it == 0) {
            let why = format!("it is a pipe, and nothing has opened it to write for {seconds} s");
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
    }
    fcntl_setfl(&file, OFlags::empty())?;
    Ok(file)
}

/// The bytes of a file that is no device, up to `most`.
fn text_bytes(file: fs::File, most: u64) -> io::Result<Vec<u8>> {
    let kind = file.metadata()?.file_type();
    if kind.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
    }
    if (kind.is_char_device() || kind.is_block_device()) && !file.is_terminal() {
        return Err(io::Error::other("it is a device"));
    }
    let mut res = Vec::new();
    file.take(most + 1).read_to_end(&mut res)?;
    if res.len() as u64 > most {
        let why = format!("it has more than {}", table::bytes(most));
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    Ok(res)
}

/// The line of a program's text that `place` is about.
fn line_of(text: &str, place: &Place) -> Option<Range<usize>> {
    let mut lines = text.split_inclusive('\n').scan(0, |at, line| {
        let start = *at;
        *at += line.len();
        let code = line.trim_start();
        let start = start + line.len() - code.len();
        Some((code.trim_end(), start..start + code.trim_end().len()))
    });
    let mut line = |fits: &dyn Fn(&str) -> bool| lines.find(|it| fits(it.0)).map(|it| it.1);
    match place {
        Place::Program | Place::Node { .. } => None,
        Place::Run => line(&|it| it.starts_with("run ")),
        Place::Value(name) => line(&|it| it.contains(&format!("%{name} "))),
        Place::Param(name) => line(&|it| format!("{it} ").starts_with(&format!("param %{name} "))),
        Place::Buffer(name) => line(&|it| it.starts_with(&format!("buffer %{name} "))),
        Place::Instruction { section, index } => {
            line(&|it| it == format!("{}:", section.name()))?;
            let mut instructions = lines.filter(|it| !it.0.is_empty() && !it.0.starts_with(';'));
            instructions.nth(*index).map(|it| it.1)
        }
    }
}

/// Where a model names the module or value that `subject` comes from: the longest dotted prefix of it
/// that the text has in quotes, else its last part (a value of a block).
fn mentioned(text: &str, subject: &str) -> Option<Range<usize>> {
    let ends = subject.char_indices().filter(|it| it.1 == '.').map(|it| it.0);
    let mut prefixes: Vec<&str> = ends.map(|it| &subject[..it]).collect();
    prefixes.push(subject);
    let last = subject.rsplit('.').next();
    prefixes.into_iter().rev().chain(last).find_map(|it| {
        let start = text.find(&format!("\"{it}\""))?;
        Some(start..start + it.len() + 2)
    })
}

/// Splits `path=value`.
fn overrides(args: &[String]) -> Outcome<Vec<(&str, &str)>> {
    args.iter().map(|it| split(it)).collect()
}

fn split(arg: &str) -> Outcome<(&str, &str)> {
    match arg.split_once('=') {
        Some((path, value)) => Ok((path.trim(), value.trim())),
        None => Err(Failure::new("PL0609", shortened(&format!("`--set {arg}` has no `=`")))
            .help("write `--set path=value`, as in `--set precision.compute=bf16`")),
    }
}

/// Characters of something quoted that a message shows.
const MAX_QUOTED: usize = 160;

/// A message in which what stands in backticks is cut in the middle where it is long: a value of `--set` may be a
/// whole model.
fn shortened(message: &str) -> String {
    let parts = message.split('`').enumerate().map(|(n, part)| {
        let (len, half) = (part.chars().count(), MAX_QUOTED / 2);
        if n % 2 == 0 || len <= MAX_QUOTED {
            return part.to_string();
        }
        let first: String = part.chars().take(half).collect();
        let last: String = part.chars().skip(len - half).collect();
        format!("{first} [{} characters] {last}", len - 2 * half)
    });
    parts.collect::<Vec<_>>().join("`")
}

/// What the system says: `no such file or directory`.
pub fn reason(error: &impl ToString) -> String {
    let text = without_errno(&error.to_string());
    let mut chars = text.chars();
    chars.next().map(|it| it.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

/// Leaves out ` (os error 2)`, which tells a user nothing more.
pub fn without_errno(text: &str) -> String {
    let Some((before, rest)) = text.split_once(" (os error ") else { return text.to_string() };
    let after = rest.split_once(')').map_or("", |it| it.1);
    format!("{before}{after}")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_pipe_is_read_up_to_a_bound() {
        let read = |text: &str| {
            let (reader, mut writer) = io::pipe().expect("a pipe");
            writer.write_all(text.as_bytes()).expect("a pipe holds so much");
            drop(writer);
            let file = fs::File::from(std::os::fd::OwnedFd::from(reader));
            text_bytes(file, 1 << 10).map_err(|it| it.to_string())
        };
        let most = "x".repeat(1 << 10);
        assert_eq!(read(&most), Ok(most.clone().into_bytes()));
        assert_eq!(read(&(most + "x")), Err("it has more than 1.00 KiB".to_string()));
    }
    /// The content of a named pipe, which `write` is given to open and fill.
    fn named_pipe(
        test: &str,
        write: impl FnOnce(PathBuf) + Send + 'static,
    ) -> Result<String, String> {
        let path = std::env::temp_dir().join(format!("planc-{test}-{}", std::process::id()));
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.expect("mkfifo").success());
        let writer = {
            let path = path.clone();
            std::thread::spawn(move || write(path))
        };
        let read = open(&path, 1).and_then(|it| text_bytes(it, 1 << 10));
        writer.join().expect("it writes");
        fs::remove_file(&path).expect("it is there");
        let text = |it: Vec<u8>| String::from_utf8(it).expect("it is text");
        read.map(text).map_err(|it| it.to_string())
    }

    #[test]
    fn a_named_pipe_needs_a_writer() {
        let found = named_pipe("no-writer", |_| ());
        let expect = "it is a pipe, and nothing has opened it to write for 1 s";
        assert_eq!(found, Err(expect.to_string()));
    }

    #[test]
    fn a_writer_of_a_named_pipe_may_take_its_time() {
        let found = named_pipe("slow", |path| {
            let mut pipe =
                fs::OpenOptions::new().write(true).open(path).expect("a reader is there");
            // Longer than a pipe may be without a writer.
            std::thread::sleep(Duration::from_millis(1500));
            pipe.write_all(b"Model()").expect("it is open");
        });
        assert_eq!(found, Ok("Model()".to_string()));
        let found = named_pipe("empty", |path| {
            drop(fs::OpenOptions::new().write(true).open(path).expect("a reader is there"));
        });
        assert_eq!(found, Ok(String::new()));
    }

    #[test]
    fn long_values_are_cut_in_the_middle() {
        let (short, long) = ("a".repeat(160), "b".repeat(1000));
        let message = format!("`{short}` is no `{long}`, {long}");
        let half = "b".repeat(80);
        let expect = format!("`{short}` is no `{half} [840 characters] {half}`, {long}");
        assert_eq!(shortened(&message), expect);
    }
}
