//! A headless Chromium, spoken to in its DevTools protocol over pipes: JSON messages, each ended by a NUL.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// A browser with one page.
pub struct Browser {
    child: Child,
    commands: File,
    answers: BufReader<File>,
    folder: PathBuf,
    session: String,
    n_sent: u64,
    /// What the page said to its console, and what it asked the network for.
    pub said: Vec<String>,
}

impl Browser {
    /// Starts Chromium, whose path `PLANC_CHROMIUM` or `tests/chromium.sh` says.
    ///
    /// Its pipes are file descriptors 3 and 4, which a shell opens: named pipes in `folder`.
    pub fn start(folder: &Path) -> Browser {
        let _ = std::fs::remove_dir_all(folder);
        std::fs::create_dir_all(folder).unwrap();
        let [commands, answers] = ["commands", "answers"].map(|it| folder.join(it));
        for pipe in [&commands, &answers] {
            assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
        }
        let child = Command::new("sh")
            .args(["-c", r#"exec "$0" "$@" 3<"$COMMANDS" 4>"$ANSWERS""#])
            .arg(chromium())
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
            .args(["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"])
            .arg(format!("--user-data-dir={}", folder.join("profile").display()))
            .args(["--remote-debugging-pipe", "about:blank"])
            .env("COMMANDS", &commands)
            .env("ANSWERS", &answers)
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("stderr")).unwrap())
            .process_group(0)
            .spawn()
            .unwrap();
        // Each end opens when the other does, in the order in which the shell opens them.
        let commands = File::options().write(true).open(commands).unwrap();
        let answers = BufReader::new(File::open(answers).unwrap());
        let mut res = Browser {
            child,
            commands,
            answers,
            folder: folder.to_path_buf(),
            session: String::new(),
            n_sent: 0,
            said: Vec::new(),
        };
        let target = res.send("Target.createTarget", json!({"url": "about:blank"}));
        let target = json!({"targetId": target["targetId"], "flatten": true});
        let attached = res.send("Target.attachToTarget", target);
        res.session = attached["sessionId"].as_str().unwrap().to_string();
        for domain in ["Page", "Runtime", "Network", "Log"] {
            res.send(&format!("{domain}.enable"), json!({}));
        }
        res.prefer("light");
        res
    }

    /// Sends a command and waits for its answer.
    #[track_caller]
    pub fn send(&mut self, method: &str, params: Value) -> Value {
        self.n_sent += 1;
        let mut message = json!({"id": self.n_sent, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let answer = self.next();
            if answer["id"] == self.n_sent {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
        }
    }

    /// The next message, which is noted if it is an event of interest.
    fn next(&mut self) -> Value {
        let mut text = Vec::new();
        self.answers.read_until(0, &mut text).unwrap();
        assert_eq!(
            text.pop(),
            Some(0),
            "Chromium ended: see {}",
            self.folder.join("stderr").display()
        );
        let message: Value = serde_json::from_slice(&text).unwrap();
        let params = &message["params"];
        match message["method"].as_str().unwrap_or_default() {
            "Runtime.consoleAPICalled" => self.said.push(format!("console: {}", params["args"])),
            "Runtime.exceptionThrown" => {
                self.said.push(format!("exception: {}", params["exceptionDetails"]));
            }
            "Log.entryAdded" => self.said.push(format!("log: {}", params["entry"])),
            "Network.requestWillBeSent" => {
                let url = params["request"]["url"].as_str().unwrap_or_default();
                if !url.starts_with("file:") && !url.starts_with("data:") {
                    self.said.push(format!("network: {url}"));
                }
            }
            _ => (),
        }
        message
    }

    /// Sets what people set in their system: `light` or `dark`. Nothing moves by itself.
    pub fn prefer(&mut self, scheme: &str) {
        let color = json!({"name": "prefers-color-scheme", "value": scheme});
        let motion = json!({"name": "prefers-reduced-motion", "value": "reduce"});
        self.send("Emulation.setEmulatedMedia", json!({"features": [color, motion]}));
    }

    /// Opens a file, in a window of this size; done when it has loaded.
    pub fn open(&mut self, page: &Path, width: u32, height: u32) {
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.send("Emulation.setDeviceMetricsOverride", size);
        let url = format!("file://{}", page.display());
        self.send("Page.navigate", json!({"url": url}));
        while self.next()["method"] != "Page.loadEventFired" {}
    }

    /// The value of an expression of the page.
    #[track_caller]
    pub fn eval(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.send("Runtime.evaluate", params);
        assert!(
            result["exceptionDetails"].is_null(),
            "{expression}: {}",
            result["exceptionDetails"]
        );
        result["result"]["value"].clone()
    }

    /// Presses and releases a key.
    pub fn key(&mut self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "End" => 35,
            "Home" => 36,
            "ArrowLeft" => 37,
            "ArrowUp" => 38,
            "ArrowRight" => 39,
            "ArrowDown" => 40,
            _ => 0,
        };
        let mut params = json!({"key": key, "code": key, "windowsVirtualKeyCode": code});
        if key.len() == 1 {
            params["text"] = json!(key);
        }
        for kind in ["keyDown", "keyUp"] {
            params["type"] = json!(kind);
            self.send("Input.dispatchKeyEvent", params.clone());
        }
    }

    /// Moves the mouse onto the middle of an element.
    pub fn point_at(&mut self, selector: &str) {
        let script = format!(
            "(() => {{ const it = document.querySelector({selector:?}); it.scrollIntoView({{block: 'center', \
             behavior: 'instant'}}); const box = it.getBoundingClientRect(); return [box.x + box.width / 2, \
             box.y + box.height / 2]; }})()"
        );
        let at = self.eval(&script);
        let params = json!({"type": "mouseMoved", "x": at[0], "y": at[1]});
        self.send("Input.dispatchMouseEvent", params);
    }

    /// A picture of the window, as a PNG file.
    pub fn screenshot(&mut self, to: &Path) {
        let png = self.send("Page.captureScreenshot", json!({"format": "png"}));
        std::fs::write(to, from_base64(png["data"].as_str().unwrap())).unwrap();
    }

    /// The page as it prints.
    pub fn print(&mut self) -> Vec<u8> {
        let pdf = self.send("Page.printToPDF", json!({"printBackground": true}));
        from_base64(pdf["data"].as_str().unwrap())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.commands.write_all(b"{\"id\":0,\"method\":\"Browser.close\"}\0");
        // It ends by itself, unless a test failed half-way.
        for _ in 0..50 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn chromium() -> String {
    if let Ok(path) = std::env::var("PLANC_CHROMIUM") {
        return path;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/chromium.sh");
    let output = Command::new(script).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "there is no Chromium");
    String::from_utf8(output.stdout).unwrap().trim().to_string()
}

fn from_base64(text: &str) -> Vec<u8> {
    let digit = |it: u8| match it {
        b'A'..=b'Z' => it - b'A',
        b'a'..=b'z' => it - b'a' + 26,
        b'0'..=b'9' => it - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => unreachable!("no digit of base 64"),
    };
    let digits: Vec<u32> =
        text.bytes().filter(|it| *it != b'=').map(|it| digit(it).into()).collect();
    let bytes = digits.chunks(4).flat_map(|it| {
        let bits = it.iter().fold(0, |bits, it| bits << 6 | it) << (6 * (4 - it.len()));
        [(bits >> 16) as u8, (bits >> 8) as u8, bits as u8].into_iter().take(it.len() * 6 / 8)
    });
    bytes.collect()
}
