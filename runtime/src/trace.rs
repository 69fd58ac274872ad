//! `--trace`: what a step does on each stream, measured and predicted, in Chrome's trace format, which Perfetto
//! opens.
//!
//! ```text
//! process   planned (h200), rank 0, rank 1, ...
//! thread    steps; s0 compute; s1 dp: all_gather of weights; ...
//! slice     an instruction, `matmul model.layers.0.mlp.act`, with what it reads, writes, computes, sends
//! arrow     from what an event marks to what waits for it
//! counter   bytes that are live, as planned, when an instruction of the compute stream starts
//! ```
//!
//! The file is a list of events, one a line. It appears under its name when the run ends, also where that fails; an
//! error of writing ends the trace and not the run. The predicted step is drawn at the time of the first that is measured.
//! While a step is measured it is queued call by call, and a GPU records an event at both ends of each
//! instruction: all else runs as without a trace.

use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use cranelift_entity::EntityRef;
use ir::Shape;
use ir::cost::{Target, Timeline};
use ir::plan::{Buffer, BySection, Instruction, Plan, PlanSection, Stream};
use ir::summary::traffic;
use serde_json::{Value, json};

use crate::bind::coord_name;
use crate::error::RunError;
use crate::exec::Span;
use crate::output::OutputFile;

/// What to trace.
#[derive(Debug, Clone)]
pub struct TraceOptions {
    /// The file.
    pub path: PathBuf,
    /// Which steps; the last, if not given.
    pub steps: Option<RangeInclusive<u64>>,
    /// The machine of the predicted timeline.
    pub target: Target,
}

impl TraceOptions {
    /// Whether to measure this step of so many.
    pub fn has(&self, step: u64, steps: u64) -> bool {
        self.steps.as_ref().map_or(step == steps, |it| it.contains(&step))
    }
}

/// Ranks of a process that are written: more make a file that is slow to open.
const RANKS_MAX: usize = 8;

/// A section as it ran on one rank. Seconds from the start of the trace.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Which.
    pub section: PlanSection,
    /// When it began.
    pub began: f64,
    /// When it was done, or failed.
    pub ended: f64,
    /// Its instructions, in milliseconds from when it began.
    pub spans: Vec<Span>,
}

/// Where a rank writes down what it ran; shared with who reads it, also after the rank failed.
#[derive(Debug, Clone)]
pub struct Recorder {
    origin: Instant,
    sections: Arc<Mutex<Vec<Measured>>>,
}

impl Recorder {
    /// An empty one; times count from `origin`.
    pub fn new(origin: Instant) -> Recorder {
        Recorder { origin, sections: Arc::default() }
    }

    /// Seconds since the start of the trace.
    pub fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// Adds a section.
    pub fn push(&self, measured: Measured) {
        self.sections.lock().unwrap_or_else(PoisonError::into_inner).push(measured);
    }

    /// All sections up to now, in order.
    pub fn take(&self) -> Vec<Measured> {
        std::mem::take(&mut *self.sections.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The file. See the [module docs](self).
pub struct Trace<'a> {
    plan: &'a Plan,
    path: PathBuf,
    out: OutputFile,
    /// The error after which nothing more is written.
    error: Option<RunError>,
    /// Somebody has heard of the error.
    told: bool,
    origin: Instant,
    target: Target,
    /// By section and instruction; none for events.
    slices: BySection<Vec<Option<Slice>>>,
    /// Bytes of the step's arena that are live, by section and instruction.
    live: BySection<Vec<u64>>,
    /// By section, from one instruction to another.
    arrows: BySection<Vec<(usize, usize)>>,
    n_events: u64,
    n_arrows: u64,
    has_planned: bool,
}

/// What is said of an instruction.
struct Slice {
    name: String,
    category: &'static str,
    args: Value,
}

/// A section on a process of the trace: microseconds.
struct Placed {
    section: PlanSection,
    began: f64,
    ended: f64,
    spans: Vec<PlacedSpan>,
}

struct PlacedSpan {
    /// None for a wait.
    index: Option<usize>,
    stream: Stream,
    start: f64,
    end: f64,
}

/// The process of the predicted timeline; that of rank `r` is `r + FIRST_RANK`.
const PLANNED: u64 = 1;
const FIRST_RANK: u64 = 2;
/// The thread of steps and sections; that of stream `s` is `s + FIRST_STREAM`.
const STEPS: u64 = 0;
const FIRST_STREAM: u64 = 1;

impl<'a> Trace<'a> {
    /// Begins the file, for a plan on these ranks.
    ///
    /// # Errors
    /// If there can be no such file. Errors of writing come later: see [`Trace::failure`].
    pub fn create(
        plan: &'a Plan,
        options: &TraceOptions,
        ranks: &[u64],
    ) -> Result<Trace<'a>, RunError> {
        let TraceOptions { path, target, .. } = options;
        let out = OutputFile::create(path).map_err(|it| RunError::write(path, &it))?;
        let mut live: BySection<Vec<u64>> = Default::default();
        for sections in PlanSection::TIMELINES {
            let mut bytes = plan.live_bytes(sections, |_| true).into_iter();
            for &section in sections {
                live[section as usize] = bytes.by_ref().take(plan.section(section).len()).collect();
            }
        }
        let mut res = Trace {
            plan,
            path: path.clone(),
            out,
            error: None,
            told: false,
            origin: Instant::now(),
            target: target.clone(),
            slices: PlanSection::ALL
                .map(|it| plan.section(it).iter().map(|it| slice(plan, it)).collect()),
            live,
            arrows: PlanSection::ALL.map(|it| arrows(plan, it)),
            n_events: 0,
            n_arrows: 0,
            has_planned: false,
        };
        res.name_process(PLANNED, &format!("planned ({})", target.name));
        for &rank in ranks.iter().take(RANKS_MAX) {
            let coord = coord_name(&plan.mesh, &plan.mesh.coord_of(rank));
            res.name_process(rank + FIRST_RANK, &format!("rank {rank} ({coord})"));
        }
        res.flush();
        Ok(res)
    }

    /// The time from which times count.
    pub fn origin(&self) -> Instant {
        self.origin
    }

    /// Adds a step, or what there is of it: what each rank recorded, in order of ranks.
    pub fn step(&mut self, step: u64, ranks: &[(u64, Vec<Measured>)]) {
        for (rank, sections) in ranks.iter().take(RANKS_MAX) {
            let placed: Vec<Placed> = sections.iter().map(Placed::measured).collect();
            let Some(first) = placed.first() else { continue };
            if !self.has_planned {
                self.has_planned = true;
                let planned = self.planned(first.began);
                self.draw(PLANNED, step, &planned);
            }
            self.draw(rank + FIRST_RANK, step, &placed);
        }
        self.flush();
    }

    /// Returns, once, the error for which the trace cannot be written.
    pub fn failure(&mut self) -> Option<&RunError> {
        let told = std::mem::replace(&mut self.told, self.error.is_some());
        self.error.as_ref().filter(|_| !told)
    }

    /// Puts the file under its name, with the reason if the run ended early.
    ///
    /// # Errors
    /// If it cannot be written and nobody has heard of that.
    pub fn finish(mut self, error: Option<&RunError>) -> Result<(), RunError> {
        if let Some(error) = error {
            let ts = self.origin.elapsed().as_secs_f64() * 1e6;
            let name = format!("the run ended: {error}");
            self.event(&json!({ "name": name, "ph": "i", "s": "g", "ts": ts, "pid": FIRST_RANK, "tid": STEPS }));
        }
        self.write("\n]\n");
        match (self.error, self.told) {
            (Some(_), true) => Ok(()),
            (Some(error), false) => Err(error),
            (None, _) => self.out.finish().map_err(|it| RunError::write(&self.path, &it)),
        }
    }

    /// A step as predicted, from a time in microseconds on.
    fn planned(&self, from: f64) -> Vec<Placed> {
        let timeline = Timeline::predict(self.plan, &self.target);
        let sections = (0..self.plan.micro_batches).map(|it| self.plan.micro_batch(it));
        let mut began = from;
        let place = |section| {
            let spans = timeline.section(section).iter().map(|it| PlacedSpan {
                index: Some(it.index),
                stream: it.stream,
                start: began + 1e6 * it.start,
                end: began + 1e6 * it.end,
            });
            let ended = began + 1e6 * timeline.section_seconds(section);
            let placed = Placed { section, began, ended, spans: spans.collect() };
            began = ended;
            placed
        };
        sections.chain([PlanSection::Update]).map(place).collect()
    }

    fn draw(&mut self, pid: u64, step: u64, sections: &[Placed]) {
        let (Some(first), Some(last)) = (sections.first(), sections.last()) else { return };
        let slice = |name: String, start: f64, end: f64| json!({ "name": name, "cat": "step", "ph": "X", "ts": start, "dur": end - start, "pid": pid, "tid": STEPS });
        self.event(&slice(format!("step {step}"), first.began, last.ended));
        let mut micro_batch = 0;
        for it in sections {
            let name = match it.section {
                PlanSection::First | PlanSection::Step | PlanSection::Last => {
                    micro_batch += 1;
                    format!("micro-batch {micro_batch} of {}", self.plan.micro_batches)
                }
                PlanSection::Prepare | PlanSection::Update => it.section.name().to_string(),
            };
            self.event(&slice(name, it.began, it.ended));
            self.draw_section(pid, it);
        }
    }

    fn draw_section(&mut self, pid: u64, placed: &Placed) {
        let section = placed.section;
        let mut spans: Vec<&PlacedSpan> = placed.spans.iter().collect();
        spans.sort_by(|a, b| {
            (a.stream, a.start).partial_cmp(&(b.stream, b.start)).expect("times are numbers")
        });
        let mut at: Vec<Option<&PlacedSpan>> = vec![None; self.plan.section(section).len()];
        for span in spans {
            let tid = span.stream.index() as u64 + FIRST_STREAM;
            let (ts, dur) = (span.start, span.end - span.start);
            let Some(index) = span.index else {
                if dur > 0.0 {
                    self.event(&json!({ "name": "wait", "cat": "wait", "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": tid }));
                }
                continue;
            };
            // What only orders streams takes no time of its own.
            let Some(slice) = &self.slices[section as usize][index] else { continue };
            at[index] = Some(span);
            let event = json!({
                "name": slice.name, "cat": slice.category, "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": tid,
                "args": slice.args,
            });
            self.event(&event);
            if span.stream.index() == 0 {
                let live = self.live[section as usize][index];
                let args = json!({ "temporary": live, "kept": self.plan.persistent_bytes });
                self.event(
                    &json!({ "name": "memory", "ph": "C", "ts": ts, "pid": pid, "args": args }),
                );
            }
        }
        let arrows = std::mem::take(&mut self.arrows[section as usize]);
        for &(from, to) in &arrows {
            let (Some(from), Some(to)) = (at[from], at[to]) else { continue };
            self.n_arrows += 1;
            let end = |span: &PlacedSpan, ph: &str, ts: f64| {
                let tid = span.stream.index() as u64 + FIRST_STREAM;
                json!({ "name": "event", "cat": "event", "ph": ph, "bp": "e", "id": self.n_arrows, "ts": ts, "pid": pid, "tid": tid })
            };
            // From within the slice, so that it is the one that the arrow belongs to.
            let ends = [end(from, "s", (from.start + from.end) / 2.0), end(to, "f", to.start)];
            ends.iter().for_each(|it| self.event(it));
        }
        self.arrows[section as usize] = arrows;
    }

    fn name_process(&mut self, pid: u64, name: &str) {
        let plan = self.plan;
        let meta = |what: &str, tid: u64, args: Value| json!({ "name": what, "ph": "M", "pid": pid, "tid": tid, "args": args });
        self.event(&meta("process_name", STEPS, json!({ "name": name })));
        self.event(&meta("process_sort_index", STEPS, json!({ "sort_index": pid })));
        self.event(&meta("thread_name", STEPS, json!({ "name": "steps" })));
        for stream in plan.streams.keys() {
            let name = plan.stream_title(stream);
            let tid = stream.index() as u64 + FIRST_STREAM;
            self.event(&meta("thread_name", tid, json!({ "name": name })));
            self.event(&meta("thread_sort_index", tid, json!({ "sort_index": tid })));
        }
    }

    fn event(&mut self, event: &Value) {
        let before = if self.n_events == 0 { "[\n" } else { ",\n" };
        self.n_events += 1;
        self.write(&format!("{before}{event}"));
    }

    fn write(&mut self, text: &str) {
        if self.error.is_none() {
            let written = self.out.write_all(text.as_bytes());
            self.note(written);
        }
    }

    fn flush(&mut self) {
        if self.error.is_none() {
            let written = self.out.flush();
            self.note(written);
        }
    }

    fn note(&mut self, written: io::Result<()>) {
        self.error = written.err().map(|it| RunError::write(&self.path, &it));
    }
}

impl Placed {
    fn measured(it: &Measured) -> Placed {
        let began = 1e6 * it.began;
        let spans = it.spans.iter().map(|span| PlacedSpan {
            index: span.at.map(|it| it.index),
            stream: span.stream,
            start: began + 1e3 * span.start,
            end: began + 1e3 * span.end,
        });
        Placed { section: it.section, began, ended: 1e6 * it.ended, spans: spans.collect() }
    }
}

fn slice(plan: &Plan, instruction: &Instruction) -> Option<Slice> {
    let names = |it: &[Buffer]| -> Vec<&str> {
        it.iter().map(|&it| plan.buffers[it].name.as_str()).collect()
    };
    let (reads, writes) = (instruction.reads(), instruction.writes());
    let bytes: u64 = reads.iter().chain(&writes).map(|&it| plan.local_bytes(it)).sum();
    let mut args = json!({ "reads": names(&reads), "writes": names(&writes), "bytes": bytes });
    let (what, category) = match instruction {
        Instruction::Compute { op, args: operands, results, .. } => {
            let shapes = |it: &[Buffer]| -> Vec<Shape> {
                it.iter().map(|&it| plan.local_shape(it)).collect()
            };
            let (operands, results) = (shapes(operands), shapes(results));
            args["op"] = op.to_text().into();
            args["flops"] = op.flops(&views(&operands), &views(&results)).into();
            (op.name(), "op")
        }
        Instruction::Collective { kind, comm, parts, .. } => {
            let axes = plan.comms[*comm];
            args["axes"] = plan.mesh.in_user_axes(&plan.mesh.names(axes), ", ").into();
            let (bytes, sent) = traffic(plan, *kind, axes, parts);
            args["bytes"] = bytes.into();
            args["bytes_sent"] = sent.into();
            (kind.name(), "collective")
        }
        Instruction::Copy { .. } => ("copy", "copy"),
        Instruction::Record { .. } | Instruction::Wait { .. } => return None,
    };
    let made = names(&writes).first().copied().unwrap_or_default();
    Some(Slice { name: format!("{what} {made}"), category, args })
}

fn views(shapes: &[Shape]) -> Vec<&[u64]> {
    shapes.iter().map(|it| &it[..]).collect()
}

/// From the last instruction that an event marks to the first that waits for it.
fn arrows(plan: &Plan, section: PlanSection) -> Vec<(usize, usize)> {
    let n_streams = plan.streams.len();
    let mut last: Vec<Option<usize>> = vec![None; n_streams];
    let mut marked: Vec<Option<usize>> = vec![None; plan.events as usize];
    let mut waits: Vec<Vec<usize>> = vec![Vec::new(); n_streams];
    let mut res = Vec::new();
    for (index, instruction) in plan.section(section).iter().enumerate() {
        let stream = instruction.stream().index();
        match instruction {
            Instruction::Record { event, .. } => marked[event.index()] = last[stream],
            Instruction::Wait { event, .. } => waits[stream].extend(marked[event.index()]),
            Instruction::Compute { .. }
            | Instruction::Collective { .. }
            | Instruction::Copy { .. } => {
                res.extend(waits[stream].drain(..).map(|from| (from, index)));
                last[stream] = Some(index);
            }
        }
    }
    res
}
