//! [`Failure`]: an error as the user sees it, on stderr: a report that points into the source, or one
//! [`Diagnostic`] as JSON on a line of its own with `--message-format json`, as are warnings and notes.
//!
//! Every error of a library becomes a `Failure` here and nowhere else.

mod excerpt;

use std::fmt;
use std::io::{IsTerminal, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use miette::{GraphicalReportHandler, GraphicalTheme, LabeledSpan, SourceCode};

use crate::controls::shown;
use crate::table::{WIDTH, wrapped};

use excerpt::Excerpt;

/// How to talk to the user; the same for all commands.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Ui {
    /// Print for people or for programs.
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub format: Format,
    /// Errors and warnings on stderr for people or for programs; by default as --format.
    #[arg(long, global = true, value_enum)]
    pub message_format: Option<Format>,
    /// Colours in reports; `auto` obeys NO_COLOR and whether stderr is a terminal.
    #[arg(long, global = true, value_enum, default_value_t = Color::Auto)]
    pub color: Color,
    /// Print results and errors only.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print more.
    #[arg(short, long, global = true)]
    pub verbose: bool,
}

/// Who reads what is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// People.
    Text,
    /// Programs.
    Json,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl Ui {
    /// How errors and warnings are printed.
    pub fn messages(&self) -> Format {
        self.message_format.unwrap_or(self.format)
    }

    /// How to colour what is printed to stdout.
    pub fn paint(&self) -> Paint {
        Paint(self.color.is_on(std::io::stdout().is_terminal()))
    }
}

impl Color {
    /// Whether to use them on what is a terminal or is none.
    pub fn is_on(self, terminal: bool) -> bool {
        let no_color = || std::env::var_os("NO_COLOR").is_some_and(|it| !it.is_empty());
        match self {
            Color::Auto => terminal && !no_color(),
            Color::Always => true,
            Color::Never => false,
        }
    }
}

/// Colours text, or leaves it as it is.
#[derive(Debug, Clone, Copy)]
pub struct Paint(bool);

impl Paint {
    /// What was.
    pub fn red(self, text: &str) -> String {
        self.with("31", text)
    }

    /// What is.
    pub fn green(self, text: &str) -> String {
        self.with("32", text)
    }

    /// A heading.
    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }
}

/// What a command gives back.
pub type Outcome<T = ()> = Result<T, Box<Failure>>;

/// See the [module docs](self).
#[derive(Debug, Clone)]
pub struct Failure {
    /// Stable code, for `planc explain`.
    pub code: &'static str,
    /// What is wrong.
    pub message: String,
    /// What would fix it.
    pub help: Option<String>,
    /// The same for programs, where there is more to it than text.
    pub details: Option<serde_json::Value>,
    /// Where.
    pub place: Option<Place>,
    /// Our mistake, not the user's.
    pub is_bug: bool,
}

/// A file, and what is wrong in it if that has a place.
#[derive(Debug, Clone)]
pub struct Place {
    /// As the user wrote it.
    pub file: PathBuf,
    /// The text and the bytes at fault.
    pub spot: Option<(String, Range<usize>)>,
}

/// An error, a warning or a note for programs: the fields of rustc's that have a meaning here.
#[derive(serde::Serialize)]
struct Diagnostic<'a> {
    /// `error`, `warning` or `note`.
    level: &'a str,
    /// `PL0204` of an error, `uneven` of a lint; null where there is none.
    code: Option<&'a str>,
    message: &'a str,
    /// Where; empty if it has no place.
    spans: Vec<SpanView<'a>>,
    /// What would fix it.
    help: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<&'a serde_json::Value>,
}

/// Lines and columns count from 1, columns in characters, bytes from 0; ends are exclusive. What has no
/// place in its file has a file only.
#[derive(serde::Serialize)]
struct SpanView<'a> {
    file: String,
    line: Option<usize>,
    column: Option<usize>,
    end_line: Option<usize>,
    end_column: Option<usize>,
    byte_start: Option<usize>,
    byte_end: Option<usize>,
    /// The line at fault.
    text: Option<&'a str>,
}

impl Failure {
    /// An error of the user.
    pub fn new(code: &'static str, message: impl Into<String>) -> Box<Failure> {
        let message = message.into();
        Box::new(Failure { code, message, help: None, details: None, place: None, is_bug: false })
    }

    /// Our mistake.
    pub fn bug(message: impl Into<String>) -> Box<Failure> {
        let mut res = Failure::new("PL0001", message);
        res.is_bug = true;
        res
    }

    /// With what would fix it.
    #[must_use]
    pub fn help(mut self: Box<Self>, help: impl Into<String>) -> Box<Failure> {
        self.help = Some(help.into());
        self
    }

    /// With data for programs.
    #[must_use]
    pub fn details(mut self: Box<Self>, details: serde_json::Value) -> Box<Failure> {
        self.details = Some(details);
        self
    }

    /// In this file.
    #[must_use]
    pub fn in_file(mut self: Box<Self>, file: &Path) -> Box<Failure> {
        self.place = Some(Place { file: file.to_path_buf(), spot: None });
        self
    }

    /// In this file, at these bytes of its text.
    #[must_use]
    pub fn at(mut self: Box<Self>, file: &Path, text: &str, bytes: Range<usize>) -> Box<Failure> {
        let start = bytes.start.min(text.len());
        let end = bytes.end.clamp(start, text.len());
        let spot = Some((text.to_string(), start..end));
        self.place = Some(Place { file: file.to_path_buf(), spot });
        self
    }

    /// Prints it on stderr; the exit code it asks for.
    pub fn report(&self, ui: &Ui) -> ExitCode {
        let text = match (ui.messages(), self.is_bug) {
            (Format::Json, _) => self.json(),
            (Format::Text, true) => bug_text(&self.message),
            (Format::Text, false) => self.text(theme(ui.color)),
        };
        // Nobody is left to tell if stderr is closed.
        print_aside(&text);
        ExitCode::from(self.exit_code())
    }

    fn exit_code(&self) -> u8 {
        if self.is_bug { 101 } else { 1 }
    }

    /// One JSON object on one line.
    fn json(&self) -> String {
        let diagnostic = Diagnostic {
            level: "error",
            code: Some(self.code),
            message: &self.message,
            spans: self.place.iter().map(Place::span).collect(),
            help: self.help.as_deref(),
            details: self.details.as_ref(),
        };
        diagnostic.line()
    }

    fn text(&self, theme: GraphicalTheme) -> String {
        let handler = GraphicalReportHandler::new_themed(theme)
            .with_context_lines(1)
            // Wrapped here, so that `--mesh` and names of passes stay whole.
            .with_wrap_lines(false)
            .with_links(false);
        let mut res = String::new();
        match handler.render_report(&mut res, &Report::of(self)) {
            Ok(()) => res,
            Err(_) => format!("error[{}]: {}\n", self.code, self.message),
        }
    }
}

impl Diagnostic<'_> {
    fn line(&self) -> String {
        format!("{}\n", serde_json::to_string(self).unwrap_or_else(|it| it.to_string()))
    }
}

/// A warning on stderr; `code` is the name of a lint, if it is one.
pub fn warning(ui: &Ui, code: Option<&str>, message: &str) -> String {
    let diagnostic =
        Diagnostic { level: "warning", code, message, spans: vec![], help: None, details: None };
    match ui.messages() {
        Format::Text => format!("warning: {message}\n"),
        Format::Json => diagnostic.line(),
    }
}

/// What was asked for beside a result, as it is printed on stderr: text for people, and for programs, whose stderr
/// has nothing but objects, a note with that text in `details`.
pub fn note(ui: &Ui, message: &str, details: &serde_json::Value, text: &str) -> String {
    let (level, details) = ("note", Some(details));
    let diagnostic = Diagnostic { level, code: None, message, spans: vec![], help: None, details };
    match ui.messages() {
        Format::Text => text.to_string(),
        Format::Json => diagnostic.line(),
    }
}

/// Reports an error of the command line, as clap does unless the line asks for JSON, and leaves.
pub fn leave_with_usage(error: &clap::Error) -> ! {
    // The error may be an argument that is not UTF-8.
    let args = std::env::args_os().map(|it| it.to_string_lossy().into_owned());
    let args: Vec<String> = args.collect();
    let value = |name: &str| {
        let after = args.iter().position(|it| it == name).and_then(|it| args.get(it + 1));
        after
            .map(String::as_str)
            .or(args.iter().find_map(|it| it.strip_prefix(name)?.strip_prefix('=')))
    };
    let json = value("--message-format").or(value("--format")) == Some("json");
    if !(json && error.use_stderr()) {
        error.exit();
    }
    let text = error.render().to_string();
    let (message, help) = text.split_once("\n\n").unwrap_or((&text, ""));
    let diagnostic = Diagnostic {
        level: "error",
        code: None,
        message: message.trim_start_matches("error: "),
        spans: vec![],
        help: Some(help.trim()).filter(|it| !it.is_empty()),
        details: None,
    };
    print_aside(&diagnostic.line());
    std::process::exit(error.exit_code());
}

impl Place {
    fn span(&self) -> SpanView<'_> {
        let file = self.file.display().to_string();
        let Some((text, bytes)) = &self.spot else {
            let (line, column, end_line, end_column) = (None, None, None, None);
            let (byte_start, byte_end) = (None, None);
            return SpanView {
                file,
                line,
                column,
                end_line,
                end_column,
                byte_start,
                byte_end,
                text: None,
            };
        };
        let (start, end) = (position(text, bytes.start), position(text, bytes.end));
        SpanView {
            file,
            line: start.map(|it| it.0),
            column: start.map(|it| it.1),
            end_line: end.map(|it| it.0),
            end_column: end.map(|it| it.1),
            byte_start: Some(bytes.start),
            byte_end: Some(bytes.end),
            text: start.and_then(|it| text.lines().nth(it.0 - 1)),
        }
    }
}

/// Line and column of a byte, from 1.
fn position(text: &str, byte: usize) -> Option<(usize, usize)> {
    let before = text.get(..byte)?;
    let line_start = before.rfind('\n').map_or(0, |it| it + 1);
    Some((before.matches('\n').count() + 1, before[line_start..].chars().count() + 1))
}

/// A [`Failure`] as `miette` wants it.
#[derive(Debug)]
struct Report<'a> {
    failure: &'a Failure,
    source: Option<Excerpt>,
}

impl Report<'_> {
    fn of(failure: &Failure) -> Report<'_> {
        let source = failure.place.as_ref().and_then(|it| {
            let (text, bytes) = it.spot.as_ref()?;
            Some(Excerpt::of(it.file.display().to_string(), text, bytes))
        });
        Report { failure, source }
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let message = match &self.failure.place {
            // What has no snippet names its file in the message.
            Some(Place { file, spot: None }) => {
                format!("{}: {}", file.display(), self.failure.message)
            }
            _ => self.failure.message.clone(),
        };
        f.write_str(&fitted(&message, WIDTH - "  x ".len()))
    }
}

impl std::error::Error for Report<'_> {}

impl miette::Diagnostic for Report<'_> {
    fn code(&self) -> Option<Box<dyn fmt::Display + '_>> {
        Some(Box::new(format!("error[{}]", self.failure.code)))
    }

    fn help(&self) -> Option<Box<dyn fmt::Display + '_>> {
        let help = self.failure.help.as_ref()?;
        Some(Box::new(fitted(help, WIDTH - "  help: ".len())))
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.source.as_ref().map(|it| it as &dyn SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        let span = self.source.as_ref()?.span();
        Some(Box::new(std::iter::once(LabeledSpan::new_with_span(None, span))))
    }
}

/// Text whose lines fit; those that start with a space are parts of a table and stay as they are.
fn fitted(text: &str, width: usize) -> String {
    let lines = text.lines().flat_map(|it| match it.starts_with(' ') {
        true => vec![it.to_string()],
        false => wrapped(it, width),
    });
    lines.collect::<Vec<String>>().join("\n")
}

/// Pictures and colours on a terminal, plain ASCII elsewhere.
fn theme(color: Color) -> GraphicalTheme {
    let terminal = std::io::stderr().is_terminal();
    match (terminal, color.is_on(terminal)) {
        (true, true) => GraphicalTheme::unicode(),
        (true, false) => GraphicalTheme::unicode_nocolor(),
        (false, true) => GraphicalTheme::ascii(),
        (false, false) => GraphicalTheme::none(),
    }
}

fn bug_text(message: &str) -> String {
    format!(
        "planc {} has a bug: {message}\n\
         This is a mistake in planc, not in your input. Please report it, with the command\n\
         line and the files that it names (or the smallest ones that show it).\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// Replaces Rust's panic message, which is for programmers, by one for users.
pub fn install_panic_hook(messages: Format) {
    std::panic::set_hook(Box::new(move |info| {
        let place = info.location().map_or(String::new(), |it| format!(" ({it})"));
        let message = format!("{}{place}", panic_message(info.payload()));
        print_aside(&match (messages, std::thread::current().name()) {
            (Format::Json, Some("main")) => Failure::bug(message).json(),
            (Format::Json, thread) => {
                let thread = thread.unwrap_or("a thread");
                Failure::bug(format!("{message}, on {thread}")).json()
            }
            (Format::Text, thread) => panic_text(&message, thread),
        });
    }));
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> &str {
    let owned = || payload.downcast_ref::<String>().map(String::as_str);
    payload.downcast_ref::<&str>().copied().or_else(owned).unwrap_or("panic")
}

fn panic_text(message: &str, thread: Option<&str>) -> String {
    match thread {
        Some("main") => bug_text(message),
        // A rank's thread is caught by the runtime, which says what became of the run.
        Some(_) | None => format!("panic on a thread of a rank: {message}\n"),
    }
}

/// Prints to stderr what nobody need read: a closed or full stderr stops nothing.
pub fn print_aside(text: &str) {
    let _ = std::io::stderr().write_all(shown(text).as_bytes());
}

/// Prints to stdout what a long run has to say on its way; whether somebody still listens.
pub fn print_progress(text: &str) -> bool {
    let mut out = std::io::stdout().lock();
    let Err(error) = out.write_all(shown(text).as_bytes()).and_then(|()| out.flush()) else {
        return true;
    };
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        print_aside(&format!("warning: cannot write to stdout: {error}\n"));
    }
    false
}

/// Prints to stdout. A reader that has seen enough (`| head`) ends the program quietly.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(shown(text).as_bytes()).and_then(|()| out.flush()) {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        let _ = writeln!(std::io::stderr(), "cannot write to stdout: {error}");
        std::process::exit(1);
    }
}

/// Prints a view to stdout: as JSON, or as the text that it makes of itself.
pub fn print_view<T: serde::Serialize>(ui: &Ui, view: &T, text: impl Fn(&T) -> String) -> Outcome {
    match ui.format {
        Format::Json => print_json(view),
        Format::Text => {
            print(&text(view));
            Ok(())
        }
    }
}

/// Prints a JSON value to stdout, on lines of its own.
pub fn print_json(value: &impl serde::Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value)
        .map_err(|it| Failure::bug(format!("cannot write JSON: {it}")))?;
    print(&format!("{text}\n"));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_called_a_bug_in_planc() {
        let payload = std::panic::catch_unwind(|| panic!("`h` has {} shardings", 2)).unwrap_err();
        let text = panic_text(panic_message(&*payload), Some("main"));
        assert!(text.contains("has a bug: `h` has 2 shardings\n"), "{text}");
        assert!(text.contains("This is a mistake in planc, not in your input."), "{text}");
        let other = panic_text("index out of bounds", Some("rank 3"));
        assert_eq!(other, "panic on a thread of a rank: index out of bounds\n");
    }

    #[test]
    fn a_bug_is_exit_code_101() {
        assert_eq!(Failure::bug("a test").exit_code(), 101);
        assert_eq!(Failure::new("PL0601", "a test").exit_code(), 1);
    }
}
