"""The server's side."""

from flwr.serverapp import ServerApp

from fedcpsl.flower import server

app = ServerApp()
app.main()(server.run)
